"""Samples from snapshots: a generator that holds the weights of those that it was given last."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Self, cast

from nemorl.config.models import GenerationConfig, PolicyConfig
from nemorl.contracts import HoldsVersions
from nemorl.errors import UsageError
from nemorl.resources.manager import short_name
from nemorl.resources.policies import TrainingPolicy
from nemorl.types import Completion, GenerationRequest, SamplingParams
from nemorl.weights import IN_PROCESS, Form, WeightHandle
from nemorl_rl.placement.engines import standalone_generation
from nemorl_rl.serving.snapshots import ADAPTER_SNAPSHOTS, SNAPSHOTS, holds_adapters
from nemorl_tensors import TokenBatch

from nemorl_agents.tinker.adapter_files import AdapterFiles
from nemorl_agents.tinker.execution import derived_seed
from nemorl_agents.tinker.models import Sampled, SampledSequence, SampleRequest, Topk


def snapshot_form(config: GenerationConfig) -> Form:
    """What the engine holds several versions of: the whole weights, or adapters alone. Before minutes of loading.

    Raises:
        UsageError: It holds one version, or does not take weights in this process.
    """
    backend = config.backend
    if IN_PROCESS in backend.weight_transports:
        if SNAPSHOTS in backend.supports:
            return "model"
        if holds_adapters(backend):
            return "adapters"
        if ADAPTER_SNAPSHOTS in backend.supports:
            message = f"generation backend {short_name(backend)} tells snapshots apart where it holds two at least"
            raise UsageError(message, fix="serve with --snapshots 2 or more")
    raise UsageError(
        f"generation backend {short_name(backend)} does not hold several snapshots in this process",
        fix="serve with --backend hf, or with --backend vllm",
    )


class SnapshotSampler:
    """A generation backend over the versions of the weights that snapshots are."""

    def __init__(self, config: GenerationConfig, policy: PolicyConfig, files: AdapterFiles | None = None) -> None:
        """
        Args:
            config: The engine.
            policy: Of the base.
            files: Of an engine that holds adapters alone: where these come from.
        """
        self.config, self.files = config, files
        self._limit = cast(HoldsVersions, config.backend).snapshots
        lora = None if files is None else files.lora
        weights = None if files is None else files.base_handle(version=0)
        self._engine = standalone_generation(config, policy.model_copy(update={"lora": lora}), weights)
        self._versions: dict[str | None, int] = {} if weights is None else {None: weights.version}
        """Of the snapshots that it holds, oldest first"""
        self._newest = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def shutdown(self) -> None:
        """Free the engine."""
        self._engine.shutdown()

    def sample(
        self, snapshot: str | None, requests: Sequence[SampleRequest], weights: Callable[[int], WeightHandle]
    ) -> list[Sampled]:
        """Answers in order.

        Args:
            snapshot: By its folder; ``None``: the base itself.
            requests: Of its weights.
            weights: Hands over the snapshot's weights under a version; asked where the engine does not hold them.
        """
        version = self._versions.get(snapshot)
        if version is None:
            version = self._newest = self._newest + 1
            self._engine.update_weights(weights(version))
            self._versions[snapshot] = version
            while len(self._versions) > self._limit:
                del self._versions[next(iter(self._versions))]
        asked = [_request(request, version) for request in requests]
        return [_sampled(*pair) for pair in zip(requests, self._engine.generate(asked), strict=True)]

    def with_likeliest(self, policy: TrainingPolicy, request: SampleRequest, sampled: Sampled) -> Sampled:
        """The answer with the likeliest tokens at each position, of a policy that has the snapshot's weights."""
        prompt, sequences = request.token_ids, sampled.sequences
        if request.topk_sample_logprobs:
            sequences = [
                replace(sequence, topk=_likeliest(policy, prompt, sequence.token_ids, request))
                for sequence in sequences
            ]
        of_prompt: Sequence[Topk | None] | None = None
        if request.topk_prompt_logprobs:
            plain = replace(request, temperature=1.0, topk_sample_logprobs=request.topk_prompt_logprobs)
            of_prompt = [None, *_likeliest(policy, prompt[:1], prompt[1:], plain)]
        return replace(sampled, sequences=sequences, topk_prompt=of_prompt)


def _request(request: SampleRequest, version: int) -> GenerationRequest:
    stops = request.stop or ()
    texts = tuple(stop for stop in stops if isinstance(stop, str))
    sampling = SamplingParams(
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k if request.top_k > 0 else None,
        max_new_tokens=request.max_tokens,
        stop_strings=texts,
        stop_token_ids=tuple(stop for stop in stops if not isinstance(stop, str)),
        prompt_logprobs=request.prompt_logprobs,
        ignore_eos=request.stop is not None,
    )
    seeds = tuple(derived_seed(f"{request.seed}:{number}") for number in range(request.num_samples))
    return GenerationRequest(request.token_ids, sampling, seeds, version=version)


def _sampled(request: SampleRequest, completions: Sequence[Completion]) -> Sampled:
    sequences = [
        SampledSequence(each.token_ids, each.logprobs, "stop" if each.finish_reason == "stop" else "length")
        for each in completions
    ]
    of_prompt = None
    if request.prompt_logprobs:
        of_prompt = [math.nan, *completions[0].prompt_logprobs[1:]]
    return Sampled(sequences, of_prompt)


def _likeliest(
    policy: TrainingPolicy, start: Sequence[int], tokens: Sequence[int], request: SampleRequest
) -> list[Topk]:
    """At each of ``tokens``, which follow ``start``."""
    ids, mask = [*start, *tokens], [False] * len(start) + [True] * len(tokens)
    batch = replace(TokenBatch.from_sequences([ids], [mask]), temperature=request.temperature)
    found, logprobs = policy.get_topk_logprobs(batch, request.topk_sample_logprobs)
    pairs = zip(found[len(start) :].tolist(), logprobs[len(start) :].tolist(), strict=True)
    return [list(zip(of_token, of_logprob, strict=True)) for of_token, of_logprob in pairs]
