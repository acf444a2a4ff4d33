"""The generation backend ``hf``: samples from a Hugging Face model inside the worker's process.

The loop over the batch of live rows is the kernel's (``nemorl_tensors.engines.decoding``); how logits come about is the
decoder's business (``decode*``), whose weights they come from that of ``generation_weights``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal

import torch
from nemorl.errors import BackendError
from nemorl.types import Completion, GenerationRequest
from nemorl_rl.tokenizer import Tokenizer, end_token_ids
from nemorl_tensors.engines.decoding import BatchLimits, Decoder, decode_responses
from nemorl_tensors.engines.observing import Activations, Recorder
from nemorl_tensors.engines.parking import Parking, bytes_held
from nemorl_tensors.engines.responses import begin_responses
from nemorl_tensors.engines.sampling import RowSampler
from torch import Tensor

from nemorl_dtensor.allocator import keep_freed_memory
from nemorl_dtensor.decode import build_decoder
from nemorl_dtensor.generation_weights import bind_weights, empty_model
from nemorl_dtensor.model import load_model
from nemorl_dtensor.observing import observed_decoding
from nemorl_dtensor.published_names import PublishedNames

if TYPE_CHECKING:
    from nemorl.config.models import GenerationConfig, PolicyConfig
    from nemorl.resources.worker import WorkerContext
    from nemorl.weights import WeightHandle
    from nemorl_base.memory import MemoryPart

    from nemorl_dtensor.config import HFGenerationConfig


class HFGeneration:
    """Generates from live weights, in process (see ``GenerationBackend``)."""

    def __init__(
        self,
        generation: GenerationConfig,
        policy: PolicyConfig,
        worker: WorkerContext,
        weights: WeightHandle | None,
        options: HFGenerationConfig,
    ) -> None:
        keep_freed_memory(worker.device)
        self._policy, self._options = policy, options
        self._device = torch.device(worker.device)
        self._version = 0
        self._decoder: Decoder | None = None
        self._parking = Parking()
        self._is_shared = False
        """The weights are those of a trainer in this process."""
        self._model: Any
        """``None`` once shut down."""
        if weights is None:
            self._model = load_model(policy, worker.device, worker.seed)
        else:
            self._model = empty_model(policy, worker.device)
            self.update_weights(weights, weights.version)
        declared = (self._model.generation_config.eos_token_id, getattr(self._model.config, "eos_token_id", None))
        self._end_ids = end_token_ids(policy.model_name, self._tokenizer, *declared)
        self._vocabulary: int = self._model.get_input_embeddings().num_embeddings

    def generate(self, requests: Sequence[GenerationRequest]) -> list[list[Completion]]:
        """One list per request, one completion per seed.

        Raises:
            BackendError: A prompt is empty, too long or not of this vocabulary, or the model's logits are not finite.
        """
        if self._model is None:
            raise BackendError("this generator has been shut down", fix="build a new one")
        self._parking.require("weights")
        groups = begin_responses(
            requests,
            vocabulary=self._vocabulary,
            max_sequence_tokens=self._policy.max_sequence_tokens,
            end_ids=self._end_ids,
            decode=self._tokenizer.decode,
        )
        if self._decoder is None:
            kept = self._options.kv_cache_tokens
            self._decoder = build_decoder(self._model, self._policy.max_sequence_tokens, turn_tokens=kept)
        limits = BatchLimits(self._options.max_batch_rows, self._options.kv_cache_tokens)
        decode_responses(chain.from_iterable(groups), self._decoder, RowSampler(self._device), limits)
        return [[response.completion(self._version) for response in group] for group in groups]

    def observe(self, request: GenerationRequest) -> tuple[Completion, Activations]:
        """A response, and what the model computed for it (``ObservableSampler``)."""
        recorder = Recorder()
        with observed_decoding(self._model, self._policy.max_sequence_tokens, recorder) as decoder:
            self._decoder = decoder
            try:
                ((completion,),) = self.generate([request])
            finally:
                self._decoder = None
        return completion, recorder.activations()

    def update_weights(self, handle: WeightHandle, version: int) -> int:
        """Generate from these weights from now on. ``in_process`` shares the trainer's tensors."""
        read = bind_weights(self._model, self._names, handle, self._device)
        self._is_shared = handle.is_in_process
        self._version = version
        self._decoder = None
        return read

    def sleep(self, level: Literal[1, 2]) -> None:
        """Drop the caches. Weights of its own leave; those that it shares with a trainer are the trainer's to move."""
        self._decoder = None
        self._parking.leave("weights", self._own_tensors(), forget=level == 2)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def wake(self, parts: Sequence[MemoryPart]) -> None:
        """Bring the weights back; caches are made when the next request needs them."""
        if "weights" in parts:
            self._parking.come_back("weights")

    def held_bytes(self) -> Mapping[MemoryPart, int]:
        turns = 0 if self._decoder is None else self._decoder.turn_bytes  # rows leave with the last response
        return {"weights": bytes_held(self._own_tensors()), "cache": turns}

    def _own_tensors(self) -> Iterator[Tensor]:
        """Those that no trainer shares."""
        if not self._is_shared and self._model is not None:
            yield from (parameter.detach() for parameter in self._model.parameters())

    def shutdown(self) -> None:
        """Let go of the weights. Calling it twice is harmless."""
        self._model = self._decoder = None

    @cached_property
    def _names(self) -> PublishedNames:
        return PublishedNames(self._model)

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return Tokenizer.of(self._policy)
