"""The generation backend ``megatron``: samples from a megatron-core model, alone or over the weights of a trainer.

The loop over the batch of live rows is the kernel's (``nemorl_tensors.engines.decoding``). Here: whose model it is and
when its weights change. Not here: passes through the model (``inference``), ranks (``inference_ranks``), names of new
weights (``generation_weights``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal, Self

import torch
from nemorl.errors import BackendError
from nemorl.types import Completion, GenerationRequest
from nemorl_rl.tokenizer import Tokenizer, end_token_ids
from nemorl_tensors.engines.decoding import BatchLimits, Decoder, RunningBatch, decode_responses
from nemorl_tensors.engines.model_config import read_model_config
from nemorl_tensors.engines.observing import Activations, Recorder
from nemorl_tensors.engines.parking import Parking, bytes_held
from nemorl_tensors.engines.responses import Response, ResponseLimits
from nemorl_tensors.engines.turns import Turns
from torch import Tensor

from nemorl_megatron.attention import CoreAttention
from nemorl_megatron.bridge.own import OwnBridge
from nemorl_megatron.generation_weights import OwnWeights
from nemorl_megatron.inference import CachedDecoder
from nemorl_megatron.inference_ranks import Stages, generating
from nemorl_megatron.model import PolicyModel
from nemorl_megatron.observing import observed
from nemorl_megatron.parallel import Parallel, Sizes

if TYPE_CHECKING:
    from nemorl.config.models import PolicyConfig
    from nemorl.resources.worker import WorkerContext
    from nemorl.weights import WeightHandle
    from nemorl_base.memory import MemoryPart

    from nemorl_megatron.bridge.contract import Bridge
    from nemorl_megatron.config import MegatronGenerationConfig


class MegatronGeneration:
    """Generates from this rank's pieces of a model (see ``GenerationBackend``)."""

    def __init__(
        self,
        pieces: Sequence[PolicyModel],
        parallel: Parallel,
        bridge: Bridge,
        policy: PolicyConfig,
        options: MegatronGenerationConfig,
        *,
        own: OwnWeights | None = None,
        leave: Callable[[], None] | None = None,
        require_weights: Callable[[], None] = lambda: None,
    ) -> None:
        """
        Args:
            pieces: This rank's, not wrapped.
            parallel: Its place.
            bridge: What built the pieces.
            policy: The model and its limits.
            options: Of this backend.
            own: The pieces' weights; ``None``: they are a trainer's, who changes and moves them.
            leave: Called once at shutdown.
            require_weights: Raises where that trainer's weights are not in memory.

        Raises:
            BackendError: The model cannot decode.
        """
        _require_decodable(pieces, parallel)
        self._options = options
        self._own, self._leave, self._require_weights = own, leave, require_weights
        self._version = 0
        self._parking = Parking()
        self._turns = Turns(options.kv_cache_tokens)
        self._stages: Stages | None = Stages(pieces, parallel, bridge.vocabulary, bridge.logit_cap)
        """``None`` once shut down."""
        if options.engine == "megatron_core":
            from nemorl_megatron.paged import require_paged

            require_paged(self._stages)
        declared, tokenizer = read_model_config(policy).to_dict().get("eos_token_id"), Tokenizer.of(policy)
        self._limits = ResponseLimits(
            bridge.vocabulary,
            policy.max_sequence_tokens,
            end_token_ids(policy.model_name, tokenizer, declared),
            tokenizer.decode,
        )

    @classmethod
    def alone(
        cls,
        policy: PolicyConfig,
        worker: WorkerContext,
        weights: WeightHandle | None,
        options: MegatronGenerationConfig,
    ) -> Self:
        """A generator with a model of its own in this process.

        Args:
            policy: The model.
            worker: Device and seed of this process.
            weights: Start from these; ``None``: from the policy's files.
            options: Of this backend.
        """
        # Each replica is whole, whatever number it has among the others.
        parallel = Parallel.join(replace(worker, rank=0, world_size=1), Sizes())
        with ExitStack() as stack:
            stack.callback(parallel.leave)
            bridge = OwnBridge(policy, read_model_config(policy))
            pieces = bridge.build(
                parallel, dtype=getattr(torch, policy.precision), attention="sdpa", activation_checkpointing=False
            )
            for piece in pieces:
                piece.requires_grad_(False)
            own = OwnWeights(pieces, bridge.settings, parallel)
            if weights is None:
                bridge.load(pieces, parallel, worker.seed)
            else:
                own.fill(weights)
            found = cls(pieces, parallel, bridge, policy, options, own=own, leave=parallel.leave)
            found._version = 0 if weights is None else weights.version
            stack.pop_all()
        return found

    @classmethod
    def of(
        cls,
        pieces: Sequence[PolicyModel],
        parallel: Parallel,
        bridge: Bridge,
        policy: PolicyConfig,
        options: MegatronGenerationConfig,
        *,
        require_weights: Callable[[], None] = lambda: None,
    ) -> Self:
        """A generator over a model that is being trained in these processes: nothing is copied or converted.

        All ranks make the same calls, those of one copy with the same requests; each is given all answers.
        """
        return cls(pieces, parallel, bridge, policy, options, require_weights=require_weights)

    def generate(self, requests: Sequence[GenerationRequest]) -> list[list[Completion]]:
        """One list per request, one completion per seed.

        Raises:
            BackendError: A prompt is empty, too long or not of this vocabulary, or the model's logits are not finite.
        """
        if self._stages is None:
            raise BackendError("this generator has been shut down", fix="build a new one")
        self._parking.require("weights")
        self._require_weights()
        stages, limits = self._stages, BatchLimits(self._options.max_batch_rows, self._options.kv_cache_tokens)
        with generating(stages.pieces):
            try:
                groups = self._limits.begin_all(requests)
                responses = [*chain.from_iterable(groups)]
                batch = RunningBatch(
                    lambda: self._decoder(limits, responses),
                    stages.sampler(),
                    limits,
                    stages.prompt_logprobs,
                    self._version,
                )
                decode_responses(responses, batch)
            finally:
                stages.keep_step()
        return [[response.completion() for response in group] for group in groups]

    def observe(self, request: GenerationRequest) -> tuple[Completion, Activations]:
        """A response, and what the model computed for it (``ObservableSampler``)."""
        if self._stages is None:
            raise BackendError("this generator has been shut down", fix="build a new one")
        if self._options.engine != "rows":
            raise BackendError("keys in megatron-core's blocks cannot be recorded", fix="set engine: rows")
        recorder, stages = Recorder(), self._stages
        with observed(stages.pieces, stages.parallel, recorder), stages.recording(recorder):
            ((completion,),) = self.generate([request])
        return completion, recorder.activations()

    def update_weights(self, handle: WeightHandle, version: int) -> None:
        """Generate from these weights from now on; with a trainer's model only their number is new."""
        if self._own is not None:
            self._parking.require("weights")
            self._own.fill(handle)
        self._turns.clear()
        self._version = version

    def sleep(self, level: Literal[1, 2]) -> None:
        """Drop the caches. Weights of its own leave; a trainer's are the trainer's to move."""
        self._turns.clear()
        self._parking.leave("weights", self._own_tensors(), forget=level == 2)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def wake(self, parts: Sequence[MemoryPart]) -> None:
        """Bring the weights back; caches are made when the next request needs them."""
        if "weights" in parts:
            self._parking.come_back("weights")

    def held_bytes(self) -> Mapping[MemoryPart, int]:
        # Rows and blocks leave with the last response.
        return {"weights": bytes_held(self._own_tensors()), "cache": self._turns.nbytes}

    def _own_tensors(self) -> Iterator[Tensor]:
        """Those that are no trainer's."""
        if self._own is not None and self._stages is not None:
            for piece in self._stages.pieces:
                yield from (parameter.detach() for parameter in piece.parameters())

    def shutdown(self) -> None:
        """Let go of the model. Calling it twice is harmless."""
        self._stages = None
        self._turns.clear()
        leave, self._leave = self._leave, None
        if leave is not None:
            leave()

    def _decoder(self, limits: BatchLimits, responses: Sequence[Response]) -> Decoder:
        assert self._stages is not None
        if self._options.engine == "rows":
            return CachedDecoder(self._stages, self._turns)
        from nemorl_megatron.paged import PagedDecoder

        return PagedDecoder(self._stages, limits, max((row.length + row.remaining for row in responses), default=1))


def _require_decodable(pieces: Sequence[Any], parallel: Parallel) -> None:
    if not all(isinstance(piece, PolicyModel) for piece in pieces):
        raise BackendError(
            "models that Megatron-Bridge built do not decode here: their attention keeps no rows of its own",
            fix="use generation.backend: vllm, or hf where the model fits one device",
        )
    kernels = {type(layer.self_attention.core_attention) for piece in pieces for layer in piece.decoder.layers}
    others = sorted(kernel.__name__ for kernel in kernels - {CoreAttention})
    if others:
        raise BackendError(
            f"generation decodes with PyTorch's attention, and the trainer's model has {', '.join(others)}",
            fix="set policy.backend.attention: sdpa, or use another generation backend",
        )
    if parallel.sizes.context > 1:
        raise BackendError(
            "context-parallel ranks see parts of a sequence, and generation has whole ones",
            fix="set policy.backend.context_parallel_size: 1, or use another generation backend",
        )
