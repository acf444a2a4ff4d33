"""The generation backend ``hf``: samples from a Hugging Face model inside the worker's process.

The model belongs to one thread (``nemorl_tensors.engines.requests``), which decodes the rows that requests join and
leave (``decoding``). How logits come about is the decoder's business (``decode*``), whose weights they come
from that of ``generation_weights``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import torch
from nemorl.types import Completion, GenerationRequest
from nemorl_rl.tokenizer import Tokenizer, end_token_ids
from nemorl_tensors.engines.decoding import BatchLimits, Decoder, RunningBatch
from nemorl_tensors.engines.observing import Activations, Recorder
from nemorl_tensors.engines.parking import Parking, bytes_held
from nemorl_tensors.engines.request_batch import RequestBatch
from nemorl_tensors.engines.requests import RequestLoop
from nemorl_tensors.engines.responses import ResponseLimits
from nemorl_tensors.engines.sampling import RowSampler
from torch import Tensor

from nemorl_dtensor.allocator import keep_freed_memory
from nemorl_dtensor.decode import build_decoder
from nemorl_dtensor.generation_weights import bind_weights, empty_model
from nemorl_dtensor.model import load_model
from nemorl_dtensor.model_head import Scorer
from nemorl_dtensor.observing import observed_decoding
from nemorl_dtensor.prompt_scores import prompt_logprobs
from nemorl_dtensor.published_names import PublishedNames

if TYPE_CHECKING:
    from nemorl.config.models import GenerationConfig, PolicyConfig
    from nemorl.resources.worker import WorkerContext
    from nemorl.weights import WeightHandle
    from nemorl_base.memory import MemoryPart

    from nemorl_dtensor.config import HFGenerationConfig


class HFGeneration:
    """Generates from live weights, in process (see ``RequestBackend``)."""

    def __init__(
        self,
        generation: GenerationConfig,
        policy: PolicyConfig,
        worker: WorkerContext,
        weights: WeightHandle | None,
        options: HFGenerationConfig,
    ) -> None:
        keep_freed_memory(worker.device)
        self._model = model = LiveModel(policy, worker, weights, options.kv_cache_tokens)
        self._batch = RunningBatch(
            model.decoder,
            RowSampler(model.device),
            BatchLimits(options.max_batch_rows, options.kv_cache_tokens),
            model.prompt_logprobs,
            version=0 if weights is None else weights.version,
        )
        tokenizer = Tokenizer.of(policy)
        self._limits = ResponseLimits(
            model.vocabulary,
            policy.max_sequence_tokens,
            end_token_ids(policy.model_name, tokenizer, *model.declared_ends),
            tokenizer.decode,
        )
        engine = RequestBatch(self._batch, self._limits.begin)
        self._loop = RequestLoop(lambda: engine, self._limits.require, "nemorl-hf")

    def submit(self, request: GenerationRequest) -> Future[list[Completion]]:
        """Begin a request, which joins those that run; models of other families than Llama's, once these have ended."""
        return self._loop.submit(request)

    def generate(self, requests: Sequence[GenerationRequest]) -> list[list[Completion]]:
        """One list per request, one completion per seed.

        Raises:
            BackendError: A prompt is empty, too long or not of this vocabulary, or the model's logits are not finite.
        """
        return self._loop.generate(requests)

    def observe(self, request: GenerationRequest) -> tuple[Completion, Activations]:
        """A response, and what the model computed for it (``ObservableSampler``)."""
        recorder = Recorder()
        with self._model.observed(recorder):
            self._loop.call(self._batch.renew)
            ((completion,),) = self.generate([request])
        self._loop.call(self._batch.renew)
        return completion, recorder.activations()

    def update_weights(self, handle: WeightHandle, version: int) -> int:
        """Generate from these weights from now on. ``in_process`` shares the trainer's tensors."""
        return self._loop.call(lambda: self._update(handle, version))

    def _update(self, handle: WeightHandle, version: int) -> int:
        read = self._model.bind(handle)
        self._batch.renew(version)
        return read

    def sleep(self, level: Literal[1, 2]) -> None:
        """Drop the caches. Weights of its own leave; those that it shares with a trainer are the trainer's to move."""
        self._loop.call_idle("sleep", lambda: self._leave(level))

    def _leave(self, level: Literal[1, 2]) -> None:
        self._batch.renew()
        self._model.leave(forget=level == 2)

    def wake(self, parts: Sequence[MemoryPart]) -> None:
        """Bring the weights back; caches are made when the next request needs them."""
        if "weights" in parts:
            self._loop.call(self._model.come_back)

    def held_bytes(self) -> Mapping[MemoryPart, int]:
        def held() -> Mapping[MemoryPart, int]:
            # Rows take memory as long as their requests run, which nobody asks about.
            return {"weights": bytes_held(self._model.own_tensors()), "cache": self._batch.turn_bytes}

        return self._loop.call(held)

    def shutdown(self) -> None:
        """Let go of the weights. Calling it twice is harmless."""
        self._loop.close()
        self._model.forget()


class LiveModel:
    """The model of a generator: weights of its own, or those of a trainer in this process."""

    def __init__(
        self, policy: PolicyConfig, worker: WorkerContext, weights: WeightHandle | None, turn_tokens: int
    ) -> None:
        """
        Args:
            policy: The model.
            worker: Device and seed.
            weights: Start from these; ``None``: from the policy's files.
            turn_tokens: Tokens of conversations that a decoder may keep.
        """
        self.device = torch.device(worker.device)
        self._max_tokens, self._turn_tokens = policy.max_sequence_tokens, turn_tokens
        self._parking = Parking()
        self._is_shared = False
        self._observed: Decoder | None = None
        self._model: Any
        """``None`` once shut down."""
        if weights is None:
            self._model = load_model(policy, worker.device, worker.seed)
        else:
            self._model = empty_model(policy, worker.device)
            self.bind(weights)
        self.vocabulary: int = self._model.get_input_embeddings().num_embeddings
        self.declared_ends = (
            self._model.generation_config.eos_token_id,
            getattr(self._model.config, "eos_token_id", None),
        )

    def bind(self, handle: WeightHandle) -> int:
        """Take these weights; bytes that were read."""
        read = bind_weights(self._model, self._names, handle, self.device)
        self._is_shared = handle.is_in_process
        return read

    @contextmanager
    def observed(self, recorder: Recorder) -> Iterator[None]:
        """Within it, what the next decoder computes is recorded."""
        with observed_decoding(self._model, self._max_tokens, recorder) as self._observed:
            yield
        self._observed = None

    def decoder(self) -> Decoder:
        """One without rows."""
        self._parking.require("weights")
        if self._observed is not None:
            return self._observed
        return build_decoder(self._model, self._max_tokens, turn_tokens=self._turn_tokens)

    def prompt_logprobs(self, prompts: Sequence[tuple[int, ...]]) -> list[tuple[float, ...]]:
        """Of each token of prompts."""
        return prompt_logprobs(self._scorer, prompts)

    def leave(self, *, forget: bool) -> None:
        """Weights of its own give their device memory back."""
        self._parking.leave("weights", self.own_tensors(), forget=forget)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def come_back(self) -> None:
        self._parking.come_back("weights")

    def own_tensors(self) -> Iterator[Tensor]:
        """Those that no trainer shares."""
        if not self._is_shared and self._model is not None:
            yield from (parameter.detach() for parameter in self._model.parameters())

    def forget(self) -> None:
        """Let go of the weights."""
        self._model = None
        vars(self).pop("_scorer", None)
        vars(self).pop("_names", None)

    @cached_property
    def _scorer(self) -> Scorer:
        return Scorer.of(self._model)

    @cached_property
    def _names(self) -> PublishedNames:
        return PublishedNames(self._model)
