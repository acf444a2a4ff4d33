"""The generation backend ``vllm``: an engine, and weights that come while it generates.

The engine lives in this process on a thread of its own (``nemorl_tensors.engines.requests``), which gives it requests
(``llm_requests``) and does all else between two of its steps. An update of the weights leaves sequences in progress
their tokens; keys and values are computed anew, so every token after it is drawn from the new weights alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from nemorl.errors import BackendError, boundary
from nemorl.metrics import Mean, Metric, Sum
from nemorl.types import Completion, GenerationRequest
from nemorl.weights import Digest, WeightHandle
from nemorl_rl.serving.snapshots import version_error
from nemorl_tensors.engines.parking import forgotten_error
from nemorl_tensors.engines.requests import RequestLoop

from nemorl_vllm.adapters import Adapters
from nemorl_vllm.conversion import VLLMLimits
from nemorl_vllm.engine import begin_observation, build_engine
from nemorl_vllm.llm_requests import ONE_ENGINE_AT_A_TIME, LLMRequests
from nemorl_vllm.nodes import FurtherNodes
from nemorl_vllm.sleeping import TAGS, sleep_of

if TYPE_CHECKING:
    from nemorl.config.models import PolicyConfig
    from nemorl.contracts.memory import MemoryPart
    from nemorl.resources.worker import WorkerContext
    from nemorl_tensors.engines.observing import Activations

    from nemorl_vllm.config import VLLMConfig

T = TypeVar("T")


class VLLMGeneration(RequestLoop):
    """Generates with a vLLM engine (see ``RequestBackend``)."""

    def __init__(
        self, policy: PolicyConfig, worker: WorkerContext, weights: WeightHandle | None, options: VLLMConfig
    ) -> None:
        if weights is None and policy.init == "random":
            raise BackendError(
                "there are no weights to generate from: policy.init is random, and no trainer handed any over",
                fix="give a model with weights and policy.init: pretrained, or start from a training run",
            )
        self._speculates = options.speculative is not None
        self._has_draft = options.speculative is not None and options.speculative.has_weights
        limits = VLLMLimits(policy, speculates=self._speculates)
        self._rounds = options.precision is not None or "quantization" in options.engine_args
        self._recomputes = options.recompute_cache
        if not self._recomputes and limits.shown.family is not None:
            raise BackendError(
                "what the engine has computed of images cannot be kept over an update of the tower",
                fix="remove recompute_cache of generation.backend",
            )
        if options.data_parallel_size > 1:
            _check_ranks(weights, worker, sees=limits.shown.family is not None)
        self._one_process = options.devices_per_replica == 1
        self._sleep = sleep_of(worker.device, leaves_memory=worker.leaves_memory)
        self._away: set[MemoryPart] = set()
        lora = policy.lora if weights is not None and weights.form == "adapters" else None
        if lora is None and options.snapshots > 1:
            raise BackendError(
                "vLLM holds several versions of adapters alone, and the weights of this engine are in the model",
                fix="remove snapshots of generation.backend, or set generation.backend: hf",
            )
        if lora is not None and self._has_draft:
            raise BackendError(
                "adapters beside the model have not been seen to work with a draft model",
                fix="set rollouts.adapters: merged, or remove speculative of generation.backend",
            )
        self._adapters = Adapters(lora, options.snapshots, limits.shown.family) if lora is not None else None
        """Where updates bring adapters alone. The model is then the stored one"""
        arguments: dict[str, Any] = {
            "max_model_len": limits.model.max_sequence_tokens,
            # vLLM 0.32 would fill a draft model with noise where it leaves the policy empty.
            "empty": weights is not None and lora is None and not self._has_draft,
            "further": limits.shown.engine_arguments,
            "lora": lora,
        }
        self._nodes = FurtherNodes(policy, worker, options, arguments)
        arguments["further"] = {**limits.shown.engine_arguments, **self._nodes.arguments}
        build = partial(build_engine, policy, worker, options, **arguments)
        self._requests = requests = LLMRequests(limits, self._adapters)
        try:
            super().__init__(lambda: requests.start(build), limits.check, "nemorl-vllm", ONE_ENGINE_AT_A_TIME)
        except BaseException:
            self._nodes.close()
            raise
        if weights is None:
            self._call(lambda engine: engine.set_weight_version("0"))
            return
        try:
            self.update_weights(weights, weights.version)
        except BaseException:
            self.shutdown()
            raise

    def take_metrics(self) -> dict[str, Metric]:
        """How many tokens were guessed since it was last asked, and if any were, how many of them were accepted
        (``ReportingSampler``)."""
        if not self._speculates:
            return {}
        counts = self._call(lambda engine: engine.collective_rpc("nemorl_take_draft_counts"))
        guesses, guessed, accepted = counts[0]  # all processes of an engine draw the same tokens
        metrics: dict[str, Metric] = {"draft_guessed_tokens": Sum(guessed)}
        if not guesses:
            return metrics
        return metrics | {
            "draft_acceptance_rate": Mean(accepted, guessed),
            "draft_acceptance_length": Mean(accepted + guesses, guesses),
        }

    def observe(self, request: GenerationRequest) -> tuple[Completion, Activations]:
        """A response, and what the model computed for it (``ObservableSampler``), with nobody else generating."""
        self._call(begin_observation)
        try:
            ((completion,),) = self.generate([request])
        finally:
            (found,) = self._call(lambda engine: engine.collective_rpc("nemorl_observed"))
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
                self._call(lambda engine: self._exchange_adapters(engine, version))
                return read
            handles = (handle,) if self._one_process else self._nodes.handles(handle)
            return self._call(lambda engine: self._exchange(engine, handles, version))

    def held_digests(self, names: Collection[str]) -> Mapping[str, Digest | str]:
        """Of what its loaders wrote into parameters in the last update (``ProvingBackend``)."""
        if self._adapters is not None:
            return dict.fromkeys(names, "vLLM scales and packs adapters")
        answers = self._call(lambda engine: engine.collective_rpc("nemorl_held_digests"))
        from nemorl_vllm.receipts import answer_of

        return answer_of(answers, names, rounds=self._rounds)

    def sleep(self, level: Literal[1, 2]) -> None:
        """Give the memory back, between two steps. Refused while requests run."""
        # No update would bring the model itself, or the draft.
        forgets = level == 2 and self._adapters is None and not self._has_draft

        def sleep() -> None:
            self._sleep.sleep(self._requests.engine, 2 if forgets else 1)
            self._now_away(set(TAGS))
            if forgets:
                self._requests.unusable = forgotten_error("weights")

        if self._away != set(TAGS) or (forgets and self._sleep.forgets_asleep):
            with boundary("vLLM"):
                self.call_idle("sleep", sleep)

    def wake(self, parts: Sequence[MemoryPart]) -> None:
        """Bring parts back, in this order. Prefixes that were cached are computed anew."""
        missing = [part for part in parts if part in self._away]

        def wake(engine: Any) -> None:
            self._sleep.wake(engine, missing)
            self._now_away(self._away - set(missing))

        if missing:
            with boundary("vLLM"):
                self._call(wake)

    def held_bytes(self) -> Mapping[MemoryPart, int]:
        """Of the fullest device of the engine."""
        found: list[dict[MemoryPart, int]] = self._call(lambda engine: engine.collective_rpc("nemorl_held_bytes"))
        return self._sleep.held(max(found, key=lambda held: sum(held.values())), self._away)

    def shutdown(self) -> None:
        """Take the engine down. Calling it twice is harmless."""
        super().shutdown()
        self._nodes.close()
        if self._adapters is not None:
            self._adapters.close()

    def _call(self, function: Callable[[Any], T]) -> T:
        """``function(engine)``, between two steps."""
        return self.call(lambda: function(self._requests.engine))

    def _now_away(self, parts: set[MemoryPart]) -> None:
        self._away = parts
        self._requests.asleep = (
            BackendError(f"this engine sleeps: {' and '.join(sorted(parts))} are away", fix="call wake first")
            if parts
            else None
        )

    def _exchange_adapters(self, engine: Any, version: int) -> None:
        """Runs on the engine's thread."""
        assert self._adapters is not None
        try:
            dropped = self._adapters.load(engine, version)
        except Exception:
            self._give_up_weights(version)
            raise
        if dropped is not None:
            self._requests.fail_version(dropped, version_error(dropped, self._adapters.versions))
        self._begin_version(engine, version)

    def _exchange(self, engine: Any, handles: Sequence[WeightHandle], version: int) -> int:
        """Runs on the engine's thread."""
        try:
            outcomes = engine.collective_rpc("nemorl_update_weights", args=(handles,))
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
        if self._recomputes:
            # Keys and values of running sequences come from the old weights: computed again, they cost one prefill.
            # Kept, they would also be found by later requests with the same prefix.
            engine.reset_prefix_cache(reset_running_requests=True)
            # So do features of images, which vLLM knows again by the image alone. Requests that ran wait now, and have
            # theirs computed again.
            engine.reset_encoder_cache()
        else:
            self._requests.cache_salt = str(version)
        engine.set_weight_version(str(version))
        self._requests.unusable = None

    def _give_up_weights(self, version: int) -> None:
        unusable = BackendError(
            f"the update to weights {version} failed half way: the engine holds parts of two versions",
            fix="update again with weights that load, or build a new generator",
        )
        self._requests.unusable = unusable
        self.fail(unusable)


def _check_ranks(weights: WeightHandle | None, worker: WorkerContext, *, sees: bool) -> None:
    """
    Raises:
        BackendError: Ranks that step together cannot do what this engine is for.
    """
    problem = fix = None
    if worker.further_nodes:
        problem, fix = "spread over several nodes", "lower data_parallel_size to the devices of a node"
    elif weights is not None and weights.form == "adapters":
        problem, fix = "apply adapters beside the model", "set rollouts.adapters: merged"
    elif sees:
        problem, fix = "be shown images or sounds", "set data_parallel_size of generation.backend to 1"
    if problem is not None:
        raise BackendError(f"ranks of data_parallel_size have not been seen to {problem}", fix=str(fix))
