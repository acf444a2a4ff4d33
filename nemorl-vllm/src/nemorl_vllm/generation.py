"""The generation backend ``vllm``: nemorl's requests to vLLM's, vLLM's outputs to completions, weights in between.

The engine lives in this process on a thread of its own (``loop``), so ``generate`` and ``update_weights`` may overlap:
an update happens between two steps. Sequences in progress keep their tokens; keys and values are computed anew, so
every token after the update is drawn from the new weights alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, cast

from nemorl.errors import BackendError, boundary
from nemorl.plugins import registry
from nemorl.types import Completion, FinishReason, GenerationRequest
from nemorl.weights import WeightHandle, transport
from nemorl_rl.tokenizer import Tokenizer
from nemorl_tensors.engines.model_config import read_model_config

from nemorl_vllm.adapters import AdapterFolder
from nemorl_vllm.engine import begin_observation, build_engine, close_engine
from nemorl_vllm.loop import EngineLoop
from nemorl_vllm.sleeping import TAGS, sleep_of

if TYPE_CHECKING:
    from nemorl.config.models import PolicyConfig
    from nemorl.resources.worker import WorkerContext
    from nemorl_base.memory import MemoryPart
    from nemorl_tensors.engines.observing import Activations

    from nemorl_vllm.config import VLLMConfig

SHARED_MEMORY = "shared_memory"

MIN_TEMPERATURE, MAX_TEMPERATURE = 0.01, 2.0
"""vLLM refuses a higher one, and silently raises a lower one: the log-probs would not be those of the temperature."""


class VLLMGeneration:
    """Generates with a vLLM engine (see ``GenerationBackend``)."""

    def __init__(
        self, policy: PolicyConfig, worker: WorkerContext, weights: WeightHandle | None, options: VLLMConfig
    ) -> None:
        if weights is None and policy.init == "random":
            raise BackendError(
                "there are no weights to generate from: policy.init is random, and no trainer handed any over",
                fix="give a model with weights and policy.init: pretrained, or start from a training run",
            )
        self._limits = _ModelLimits(policy)
        self._one_process = options.tensor_parallel_size == 1
        self._republisher = transport(SHARED_MEMORY)
        self._sleep = sleep_of(worker.device, leaves_memory=worker.leaves_memory)
        self._away: set[MemoryPart] = set()
        self._unusable: BackendError | None = None
        """Why the weights are unusable, after an update that failed half way."""
        lora = policy.lora if weights is not None and weights.form == "adapters" else None
        self._adapters = AdapterFolder(lora) if lora is not None else None
        """Where updates bring adapters alone. The model is then the stored one"""
        self._loop = EngineLoop(
            lambda: build_engine(
                policy,
                worker,
                options,
                max_model_len=self._limits.max_tokens,
                empty=weights is not None and lora is None,
                lora=lora,
            ),
            close_engine,
            adapter=self._adapters.request() if self._adapters is not None else None,
        )
        if weights is None:
            self._loop.call(lambda engine: engine.set_weight_version("0"))
            return
        try:
            self.update_weights(weights, weights.version)
        except BaseException:
            self.shutdown()
            raise

    def generate(self, requests: Sequence[GenerationRequest]) -> list[list[Completion]]:
        """One list per request, one completion per seed. Several threads may call it: they share the batch.

        Raises:
            BackendError: A prompt is empty, too long or not of this vocabulary, or the model's logits are not finite.
        """
        if self._unusable is not None:
            raise self._unusable
        if self._away:
            raise BackendError(
                f"this engine sleeps: {' and '.join(sorted(self._away))} are away", fix="call wake first"
            )
        samples: list[tuple[Sequence[int], Any]] = []
        for index, request in enumerate(requests):
            self._limits.check(index, request)
            for seed in request.seeds:
                samples.append((request.token_ids, self._params(request, seed)))
        with boundary("vLLM"):
            outputs = iter(self._loop.generate(samples))
        return [[_completion(next(outputs)) for _ in request.seeds] for request in requests]

    def observe(self, request: GenerationRequest) -> tuple[Completion, Activations]:
        """A response, and what the model computed for it (``ObservableSampler``), with nobody else generating."""
        self._loop.call(begin_observation)
        try:
            ((completion,),) = self.generate([request])
        finally:
            (found,) = self._loop.call(lambda engine: engine.collective_rpc("nemorl_observed"))
        return completion, found

    def update_weights(self, handle: WeightHandle, version: int) -> int:
        """Generate from these weights from now on, also where a sequence is half done."""
        if (handle.form == "adapters") != (self._adapters is not None):
            raise BackendError(
                f"weights in the form {handle.form!r} came to an engine that was built for another one",
                fix="build a generator with the form that it will be given",
            )
        with boundary("vLLM"):
            if self._adapters is not None:
                read = self._adapters.write(handle)
                self._loop.call(lambda engine: self._exchange_adapters(engine, version))
                return read
            if not self._one_process:
                handle = self._for_all_processes(handle, version)
            return self._loop.call(lambda engine: self._exchange(engine, handle, version))

    def sleep(self, level: Literal[1, 2]) -> None:
        """Give the memory back, between two steps. Nobody may generate meanwhile."""
        if self._away != set(TAGS):
            kept: Literal[1, 2] = level if self._adapters is None else 1  # no update would bring the model itself
            with boundary("vLLM"):
                self._loop.call(lambda engine: self._sleep.sleep(engine, kept))
            self._away = set(TAGS)

    def wake(self, parts: Sequence[MemoryPart]) -> None:
        """Bring parts back, in this order. Prefixes that were cached are computed anew."""
        missing = [part for part in parts if part in self._away]
        if missing:
            with boundary("vLLM"):
                self._loop.call(lambda engine: self._sleep.wake(engine, missing))
            self._away -= set(missing)

    def held_bytes(self) -> Mapping[MemoryPart, int]:
        """Of the fullest device of the engine."""
        found: list[dict[MemoryPart, int]] = self._loop.call(lambda engine: engine.collective_rpc("nemorl_held_bytes"))
        return max(found, key=lambda held: sum(held.values()))

    def shutdown(self) -> None:
        """Take the engine down. Calling it twice is harmless."""
        self._loop.close()
        self._republisher.close()
        if self._adapters is not None:
            self._adapters.close()

    def _for_all_processes(self, handle: WeightHandle, version: int) -> WeightHandle:
        """Weights that every process which holds a part of the model can fetch by itself."""
        if registry().load("weight_transports", handle.transport).reaches_subprocesses:
            return handle
        return WeightHandle(SHARED_MEMORY, version, self._republisher.publish(handle.buckets))

    def _exchange_adapters(self, engine: Any, version: int) -> None:
        """Runs on the engine's thread."""
        assert self._adapters is not None
        try:
            engine.add_lora(self._adapters.request(replaces=True))
        except Exception:
            self._give_up_weights(version)
            raise
        self._begin_version(engine, version)

    def _exchange(self, engine: Any, handle: WeightHandle, version: int) -> int:
        """Runs on the engine's thread."""
        try:
            outcomes = engine.collective_rpc("nemorl_update_weights", args=(handle,))
        except Exception:
            self._give_up_weights(version)
            raise
        not_fetched = [outcome for outcome in outcomes if not isinstance(outcome, int)]
        if not_fetched:
            if len(not_fetched) < len(outcomes):
                self._give_up_weights(version)
            raise not_fetched[0].error
        self._begin_version(engine, version)
        read: int = outcomes[0]
        return read

    def _begin_version(self, engine: Any, version: int) -> None:
        # Keys and values of running sequences come from the old weights: computed again, they cost one prefill. Kept,
        # they would also be found by later requests with the same prefix.
        engine.reset_prefix_cache(reset_running_requests=True)
        engine.set_weight_version(str(version))
        self._unusable = None

    def _give_up_weights(self, version: int) -> None:
        self._unusable = BackendError(
            f"the update to weights {version} failed half way: the engine holds parts of two versions",
            fix="update again with weights that load, or build a new generator",
        )
        self._loop.fail(self._unusable)

    def _params(self, request: GenerationRequest, seed: int) -> Any:
        from vllm import SamplingParams as VLLMSamplingParams
        from vllm.sampling_params import RequestOutputKind

        sampling = request.sampling
        return VLLMSamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k or 0,
            min_p=sampling.min_p,
            seed=mixed_seed(seed),
            max_tokens=self._limits.new_tokens(request),
            stop=list(sampling.stop_strings),
            stop_token_ids=sorted(self._limits.end_ids.union(sampling.stop_token_ids)),
            ignore_eos=True,  # the end tokens are among the above: one rule for all of them
            detokenize=bool(sampling.stop_strings),
            include_stop_str_in_output=True,
            # Of the sampled token alone; beside it, in place of a second one, after top-k and top-p (``sampler``).
            logprobs=int(sampling.filtered_logprobs and sampling.temperature > 0),
            flat_logprobs=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )


class _ModelLimits:
    """What the model can be asked for: its vocabulary, its longest sequence, the tokens that end a response."""

    def __init__(self, policy: PolicyConfig) -> None:
        with boundary(f"transformers, reading the config of {policy.model_name!r},"):
            config = read_model_config(policy)
        text = config.get_text_config()
        self.vocabulary: int = text.vocab_size
        self.max_tokens = policy.max_sequence_tokens
        self._why = "policy.max_sequence_tokens"
        positions = getattr(text, "max_position_embeddings", None)
        if positions is not None and positions < self.max_tokens:
            self.max_tokens, self._why = positions, "the model's max_position_embeddings"
        self.end_ids = _end_token_ids(policy, config)

    def new_tokens(self, request: GenerationRequest) -> int:
        """Most tokens that a response may have."""
        return min(request.sampling.max_new_tokens, self.max_tokens - len(request.token_ids))

    def check(self, index: int, request: GenerationRequest) -> None:
        """Refuse what the engine would refuse, in words that name the request."""
        prompt, problem, fix = request.token_ids, None, ""
        if not prompt:
            problem, fix = "has an empty prompt", "give at least one token, e.g. the beginning-of-sequence token"
        elif len(prompt) >= self.max_tokens:
            problem = f"has a prompt of {len(prompt)} tokens; {self._why} = {self.max_tokens} leaves no room"
            fix = "shorten the prompt, or raise policy.max_sequence_tokens as far as the model allows"
        elif min(prompt) < 0 or max(prompt) >= self.vocabulary:
            problem = f"has token ids from {min(prompt)} to {max(prompt)}; the model knows 0 to {self.vocabulary - 1}"
            fix = "tokenize with the policy's tokenizer"
        elif request.sampling.max_new_tokens < 1:
            problem, fix = f"asks for {request.sampling.max_new_tokens} new tokens", "ask for at least one"
        elif request.sampling.temperature and not MIN_TEMPERATURE <= request.sampling.temperature <= MAX_TEMPERATURE:
            problem = f"asks for temperature {request.sampling.temperature:g}; vLLM samples only at those between"
            problem += f" {MIN_TEMPERATURE:g} and {MAX_TEMPERATURE:g}"
            fix = "set a temperature in that range, 0 for greedy, or generation.backend: hf"
        if problem is not None:
            raise BackendError(f"generation request {index} {problem}", fix=fix)


def _end_token_ids(policy: PolicyConfig, config: Any) -> frozenset[int]:
    """Every token that ends a response, by the model's generation config, its config, and its tokenizer."""
    from transformers import GenerationConfig

    try:
        stored = GenerationConfig.from_pretrained(policy.model_name).eos_token_id
    except OSError:  # the file is optional
        stored = None
    declared = (stored, getattr(config, "eos_token_id", None), getattr(config.get_text_config(), "eos_token_id", None))
    ids = {token for value in declared for token in (value if isinstance(value, (list, tuple)) else [value])}
    return Tokenizer.of(policy).stop_token_ids.union(token for token in ids if token is not None)


def mixed_seed(seed: int) -> int:
    """A 63-bit seed for vLLM, whose low half depends on all of ``seed``: generators of the CPU look at 32 bits alone.

    The finalizer of SplitMix64 (https://doi.org/10.1145/2660193.2660195).
    """
    mask = 2**64 - 1
    seed &= mask
    seed = ((seed ^ seed >> 30) * 0xBF58476D1CE4E5B9) & mask
    seed = ((seed ^ seed >> 27) * 0x94D049BB133111EB) & mask
    return (seed ^ seed >> 31) >> 1


def _completion(output: Any) -> Completion:
    """A finished ``RequestOutput`` as nemorl's completion."""
    (sample,) = output.outputs
    each = len(sample.logprobs.logprobs) // max(1, len(sample.token_ids))
    logprobs = tuple(sample.logprobs.logprobs[each - 1 :: each]) if each else ()
    if not all(map(math.isfinite, logprobs)):
        place = next(index for index, value in enumerate(logprobs) if not math.isfinite(value))
        raise BackendError(
            f"the model's logits are not finite at token {place} of a response",
            fix="the weights have diverged: lower the learning rate, or restart from an earlier checkpoint",
        )
    if sample.finish_reason not in ("stop", "length"):
        raise BackendError(
            f"vLLM ended a request with {sample.finish_reason!r}",
            fix="VLLM_LOGGING_LEVEL=INFO in the environment shows its own report",
        )
    versions = tuple(int(span.version) for span in sample.weight_versions)
    return Completion(tuple(sample.token_ids), logprobs, cast(FinishReason, sample.finish_reason), versions)
