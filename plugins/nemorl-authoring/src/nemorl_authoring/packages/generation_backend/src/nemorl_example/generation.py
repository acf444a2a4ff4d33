"""The backend: ``nemorl.contracts.GenerationBackend`` is the specification, ``nemorl.testing`` its tests.

# R = responses to one prompt, V = vocabulary

All responses to a prompt grow side by side from one cache; as they begin with the same tokens, nothing is padded. How
a token is drawn is in ``sampling``.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from nemorl.errors import BackendError
from nemorl.tokenizer import Tokenizer
from nemorl.types import Completion, GenerationRequest
from nemorl.weights import WeightHandle

from nemorl_example.sampling import draw

if TYPE_CHECKING:
    from nemorl.config import PolicyConfig
    from nemorl.resources.worker import WorkerContext


class ExampleGeneration:
    """One process, prompt by prompt."""

    def __init__(
        self, policy: PolicyConfig, worker: WorkerContext, weights: WeightHandle | None, max_rows: int
    ) -> None:
        self._limit, self._max_rows, self._device = policy.max_sequence_tokens, max_rows, worker.device
        self._version = 0
        self._tokenizer = Tokenizer.load(policy.model_name)
        self._model = load_model(policy, worker, with_weights=weights is None)
        if weights is not None:
            self.update_weights(weights, weights.version)
        declared = self._model.generation_config.eos_token_id
        ends = declared if isinstance(declared, list) else [declared]
        self._end_ids = self._tokenizer.stop_token_ids | set(ends) - {None}

    @torch.inference_mode()
    def generate(self, requests: Sequence[GenerationRequest]) -> list[list[Completion]]:
        for index, request in enumerate(requests):
            if not 0 < len(request.token_ids) < self._limit:
                raise BackendError(
                    f"request {index} has a prompt of {len(request.token_ids)} tokens; with a response it must be "
                    f"between 1 and policy.max_sequence_tokens = {self._limit}",
                    fix="shorten the prompt, or raise policy.max_sequence_tokens",
                )
        return [
            [
                completion
                for start in range(0, len(request.seeds), self._max_rows)
                for completion in self._respond(request, request.seeds[start : start + self._max_rows])
            ]
            for request in requests
        ]

    def update_weights(self, handle: WeightHandle, version: int) -> None:
        names = {name for name, _ in self._model.named_parameters()}
        for bucket in handle.buckets():
            # assign: the tensors are used where they are. In process they are the trainer's own, and nothing is copied.
            tensors = {name: tensor.detach().to(self._device) for name, tensor in bucket.items()}
            unknown = self._model.load_state_dict(tensors, strict=False, assign=True).unexpected_keys
            if unknown:
                raise BackendError(f"the model has no {unknown[0]!r}", fix="train and generate with the same model")
            names -= tensors.keys()
        if names:
            raise BackendError(f"no weights were sent for {sorted(names)[0]!r}", fix="export every parameter")
        self._model.tie_weights()
        self._version = version

    def shutdown(self) -> None:
        self._model = None

    def _respond(self, request: GenerationRequest, seeds: Sequence[int]) -> list[Completion]:
        """One completion per seed."""
        params = request.sampling
        limit = min(params.max_new_tokens, self._limit - len(request.token_ids))
        stop_ids = self._end_ids.union(params.stop_token_ids)
        generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        ids: list[list[int]] = [[] for _ in seeds]
        logprobs: list[list[float]] = [[] for _ in seeds]
        stopped = [False] * len(seeds)
        fed = torch.tensor([request.token_ids] * len(seeds), device=self._device)
        cache: Any = None
        for _ in range(limit):
            output = self._model(input_ids=fed, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache = output.past_key_values
            tokens_R, logprobs_R = draw(output.logits[:, -1].float().cpu(), params, generators)
            for row, (token, logprob) in enumerate(zip(tokens_R.tolist(), logprobs_R.tolist(), strict=True)):
                if not stopped[row]:  # a response that has ended draws on, and nobody reads it
                    ids[row].append(token)
                    logprobs[row].append(logprob)
                    stopped[row] = token in stop_ids or self._says(ids[row], params.stop_strings)
            if all(stopped):
                break
            fed = tokens_R[:, None].to(self._device)
        return [
            Completion(tuple(found), tuple(nats), "stop" if ended else "length", (self._version,))
            for found, nats, ended in zip(ids, logprobs, stopped, strict=True)
        ]

    def _says(self, ids: Sequence[int], strings: Sequence[str]) -> bool:
        return bool(strings) and any(string in self._tokenizer.decode(ids) for string in strings)


def load_model(policy: PolicyConfig, worker: WorkerContext, *, with_weights: bool) -> Any:
    """The policy's model; without weights, or with ``init: random``, its parameters are random."""
    from transformers import AutoConfig, AutoModelForCausalLM

    name = str(Path(policy.model_name).expanduser())
    dtype = getattr(torch, policy.precision)
    model: Any
    if with_weights and policy.init == "pretrained":
        model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype)
    else:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(worker.seed)
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(name), dtype=dtype)
    return model.to(worker.device).eval().requires_grad_(False)
