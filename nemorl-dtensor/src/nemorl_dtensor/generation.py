"""The generation backend ``hf``: samples from a Hugging Face model inside the worker's process.

The model belongs to one thread (``nemorl_tensors.engines.requests``), which decodes the rows that requests join and
leave (``decoding``), from one version of the weights or several (``versions``). How logits come about is the decoder's
business (``decode*``), whose weights they come from that of ``live_model`` and ``generation_weights``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Literal

from nemorl.types import Completion, GenerationRequest
from nemorl_rl.data.tokenizer import Tokenizer, end_token_ids
from nemorl_tensors.engines.decoding import BatchLimits, RunningBatch
from nemorl_tensors.engines.observing import Activations, Recorder
from nemorl_tensors.engines.parking import bytes_held
from nemorl_tensors.engines.request_batch import RequestBatch
from nemorl_tensors.engines.requests import RequestLoop
from nemorl_tensors.engines.responses import ResponseLimits
from nemorl_tensors.engines.sampling import RowSampler

from nemorl_dtensor.allocator import keep_freed_memory
from nemorl_dtensor.live_model import LiveModel
from nemorl_dtensor.versions import Held, Versions

if TYPE_CHECKING:
    from nemorl.config.models import GenerationConfig, PolicyConfig
    from nemorl.contracts.memory import MemoryPart
    from nemorl.resources.worker import WorkerContext
    from nemorl.weights import Digest, WeightHandle

    from nemorl_dtensor.config import HFGenerationConfig


class HFGeneration(RequestLoop):
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
        first = _model(policy, worker, options, is_empty=weights is not None)
        if weights is not None:
            first.bind(weights)
        tokenizer = Tokenizer.of(policy)
        self._limits = limits = ResponseLimits(
            first.vocabulary,
            policy.max_sequence_tokens,
            end_token_ids(policy.model_name, tokenizer, *first.declared_ends),
            tokenizer.decode,
            placeholders=first.placeholders,
            has_routes=first.routers is not None,
        )
        version = 0 if weights is None else weights.version

        def hold(model: LiveModel) -> Held:
            batch = RunningBatch(
                model.decoder,
                RowSampler(model.device),
                BatchLimits(options.max_batch_rows, options.kv_cache_tokens),
                model.prompt_logprobs,
                version,
            )
            return Held(model, batch, RequestBatch(batch, limits.begin))

        self._versions = versions = Versions(
            hold(first), version, options.snapshots, lambda: hold(_model(policy, worker, options, is_empty=True))
        )
        super().__init__(lambda: versions, limits.require, "nemorl-hf")

    def observe(self, request: GenerationRequest) -> tuple[Completion, Activations]:
        """A response, and what the model computed for it (``ObservableSampler``)."""
        recorder, newest = Recorder(), self._versions.newest
        try:
            with newest.model.observed(recorder):
                self.call(newest.batch.renew)
                ((completion,),) = self.generate([request])
        finally:
            self.call(newest.batch.renew)
        return completion, recorder.activations()

    def update_weights(self, handle: WeightHandle, version: int) -> int:
        """Generate from these weights from now on. ``in_process`` shares the trainer's tensors, unless the option
        ``snapshots`` has older versions held too."""
        return self.call(lambda: self._versions.update(handle, version))

    def held_digests(self, names: Collection[str]) -> Mapping[str, Digest]:
        """Of the newest weights, in the memory that it samples from (``ProvingBackend``)."""
        return self.call(lambda: self._versions.newest.model.held_digests(names))

    def sleep(self, level: Literal[1, 2]) -> None:
        """Drop the caches. Weights of its own leave; those that it shares with a trainer are the trainer's to move."""
        self.call_idle("sleep", lambda: self._leave(level))

    def _leave(self, level: Literal[1, 2]) -> None:
        if level == 2:
            self._versions.keep_newest()
        for held in self._versions.all:
            held.batch.renew()
            held.model.leave(forget=level == 2)

    def wake(self, parts: Sequence[MemoryPart]) -> None:
        """Bring the weights back; caches are made when the next request needs them."""
        if "weights" in parts:
            self.call(self._come_back)

    def _come_back(self) -> None:
        for held in self._versions.all:
            held.model.come_back()

    def held_bytes(self) -> Mapping[MemoryPart, int]:
        def held() -> Mapping[MemoryPart, int]:
            tensors = chain.from_iterable(held.model.own_tensors() for held in self._versions.all)
            # Rows take memory as long as their requests run, which nobody asks about.
            return {"weights": bytes_held(tensors), "cache": sum(held.batch.turn_bytes for held in self._versions.all)}

        return self.call(held)

    def shutdown(self) -> None:
        """Let go of the weights. Calling it twice is harmless."""
        super().shutdown()
        for held in self._versions.all:
            held.model.forget()


def _model(policy: PolicyConfig, worker: WorkerContext, options: HFGenerationConfig, *, is_empty: bool) -> LiveModel:
    return LiveModel(policy, worker, options.kv_cache_tokens, is_empty=is_empty, copies=options.snapshots > 1)
