"""The generation backend ``megatron`` over the weights of a trainer, in its processes.

The loop over the batch of live rows is ``nemorl_tensors.engines.decoding``. Not here: passes through the model
(``inference``), ranks (``inference_ranks``), a generator with a model of its own (``alone``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal

import torch
from nemorl.errors import BackendError
from nemorl.types import Completion, GenerationRequest
from nemorl_rl.data.tokenizer import Tokenizer, end_token_ids
from nemorl_tensors.engines.decoding import BatchLimits, Decoder, RunningBatch, decode_responses
from nemorl_tensors.engines.model_config import read_model_config
from nemorl_tensors.engines.observing import Activations, Recorder
from nemorl_tensors.engines.responses import Response, ResponseLimits
from nemorl_tensors.engines.turns import Turns

from nemorl_megatron.attention import CoreAttention
from nemorl_megatron.inference import CachedDecoder
from nemorl_megatron.inference_ranks import Stages, generating
from nemorl_megatron.model import PolicyModel
from nemorl_megatron.observing import observed

if TYPE_CHECKING:
    from nemorl.config.models import TrainingOptions
    from nemorl.contracts.memory import MemoryPart
    from nemorl.weights import WeightHandle

    from nemorl_megatron.bridge.contract import Bridge
    from nemorl_megatron.config import MegatronGenerationConfig
    from nemorl_megatron.parallel import Parallel


class MegatronGeneration:
    """Generates from this rank's pieces of a model (see ``GenerationBackend``)."""

    def __init__(
        self,
        pieces: Sequence[PolicyModel],
        parallel: Parallel,
        bridge: Bridge,
        policy: TrainingOptions,
        options: MegatronGenerationConfig,
        *,
        require_weights: Callable[[], None] = lambda: None,
    ) -> None:
        """
        Args:
            pieces: This rank's, not wrapped. Nothing of them is copied or converted.
            parallel: Its place. All ranks make the same calls, those of one copy with the same requests; each is given
                all answers.
            bridge: What built the pieces.
            policy: The model and its limits.
            options: Of this backend.
            require_weights: Raises where the weights are not in memory.

        Raises:
            BackendError: The model cannot decode.
        """
        _require_decodable(pieces, parallel)
        self._options, self._require_weights = options, require_weights
        self._version = 0
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

    def generate(self, requests: Sequence[GenerationRequest]) -> list[list[Completion]]:
        """One list per request, one completion per seed.

        Raises:
            BackendError: A prompt is empty, too long or not of this vocabulary, or the model's logits are not finite.
        """
        stages, limits = self._live, BatchLimits(self._options.max_batch_rows, self._options.kv_cache_tokens)
        self._require_weights()
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
        recorder, stages = Recorder(), self._live
        if self._options.engine != "rows":
            raise BackendError("keys in megatron-core's blocks cannot be recorded", fix="set engine: rows")
        with observed(stages.pieces, stages.parallel, recorder), stages.recording(recorder):
            ((completion,),) = self.generate([request])
        return completion, recorder.activations()

    def update_weights(self, handle: WeightHandle, version: int) -> None:
        """Generate from the trainer's weights as they are from now on: only their number is new."""
        self._turns.clear()
        self._version = version

    def sleep(self, level: Literal[1, 2]) -> None:
        """Drop the caches. The weights are the trainer's to move."""
        self._turns.clear()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def wake(self, parts: Sequence[MemoryPart]) -> None:
        """Nothing to bring: caches are made when the next request needs them."""

    def held_bytes(self) -> Mapping[MemoryPart, int]:
        # Rows and blocks leave with the last response.
        return {"weights": 0, "cache": self._turns.nbytes}

    def shutdown(self) -> None:
        """Let go of the model. Calling it twice is harmless."""
        self._stages = None
        self._turns.clear()

    @property
    def _live(self) -> Stages:
        if self._stages is None:
            raise BackendError("this generator has been shut down", fix="build a new one")
        return self._stages

    def _decoder(self, limits: BatchLimits, responses: Sequence[Response]) -> Decoder:
        longest = max((row.length + row.remaining for row in responses), default=1)
        return build_decoder(self._live, self._turns, self._options, limits, longest)


def build_decoder(
    stages: Stages, turns: Turns, options: MegatronGenerationConfig, limits: BatchLimits, longest: int
) -> Decoder:
    """One without rows, none of which will have more than ``longest`` tokens."""
    if options.engine == "rows":
        return CachedDecoder(stages, turns)
    from nemorl_megatron.paged import PagedDecoder

    return PagedDecoder(stages, limits, longest)


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
