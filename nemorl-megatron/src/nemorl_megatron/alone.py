"""The generation backend ``megatron`` with a model of its own, in one process: it takes requests one by one.

The model belongs to one thread (``nemorl_tensors.engines.requests``). Names of new weights: ``generation_weights``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import torch
from nemorl_tensors.engines.decoding import BatchLimits, Decoder, RunningBatch
from nemorl_tensors.engines.model_config import read_model_config
from nemorl_tensors.engines.parking import Parking, bytes_held
from nemorl_tensors.engines.request_batch import RequestBatch
from nemorl_tensors.engines.requests import RequestLoop
from torch import Tensor

from nemorl_megatron.bridge.own import OwnBridge
from nemorl_megatron.generation import MegatronGeneration, build_decoder
from nemorl_megatron.generation_weights import OwnWeights
from nemorl_megatron.parallel import Parallel, Sizes

if TYPE_CHECKING:
    from nemorl.config.models import PolicyConfig
    from nemorl.contracts.memory import MemoryPart
    from nemorl.resources.worker import WorkerContext
    from nemorl.weights import Digest, WeightHandle

    from nemorl_megatron.config import MegatronGenerationConfig


class AloneGeneration(RequestLoop, MegatronGeneration):
    """Generates from weights of its own (see ``RequestBackend``)."""

    def __init__(
        self,
        policy: PolicyConfig,
        worker: WorkerContext,
        weights: WeightHandle | None,
        options: MegatronGenerationConfig,
    ) -> None:
        """
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
            self._pieces = bridge.build(
                parallel, dtype=getattr(torch, policy.precision), attention="sdpa", activation_checkpointing=False
            )
            for piece in self._pieces:
                piece.eval().requires_grad_(False)
            self._own = OwnWeights(self._pieces, bridge.settings, parallel)
            if weights is None:
                bridge.load(self._pieces, parallel, worker.seed)
            else:
                self._own.fill(weights)
            MegatronGeneration.__init__(self, self._pieces, parallel, bridge, policy, options)
            self._parking = Parking()
            version = 0 if weights is None else weights.version
            self._batch = self._running_batch(policy.max_sequence_tokens, version)
            start = self._starter(torch.device(worker.device))
            RequestLoop.__init__(self, start, self._limits.require, "nemorl-megatron")
            self._leave = stack.pop_all()

    def update_weights(self, handle: WeightHandle, version: int) -> None:
        """Generate from these weights from now on."""
        self.call(lambda: self._update(handle, version))

    def held_digests(self, names: Collection[str]) -> Mapping[str, Digest]:
        """Of the parameters that it samples from (``ProvingBackend``)."""

        def found() -> Mapping[str, Digest]:
            self._parking.require_content("weights")
            return self._own.held_digests(names)

        return self.call(found)

    def _update(self, handle: WeightHandle, version: int) -> None:
        self._parking.require("weights")
        self._own.fill(handle)
        self._parking.renewed("weights")
        self._batch.renew(version)
        self._turns.clear()

    def sleep(self, level: Literal[1, 2]) -> None:
        """Drop the caches, and give the weights' device memory back."""
        self.call_idle("sleep", lambda: self._park(level))

    def _park(self, level: Literal[1, 2]) -> None:
        self._batch.renew()
        self._parking.leave("weights", self._own_tensors(), forget=level == 2)
        super().sleep(level)

    def wake(self, parts: Sequence[MemoryPart]) -> None:
        """Bring the weights back; caches are made when the next request needs them."""
        if "weights" in parts:
            self.call(lambda: self._parking.come_back("weights"))

    def held_bytes(self) -> Mapping[MemoryPart, int]:
        # Rows take memory as long as their requests run, which nobody asks about.
        return self.call(lambda: {"weights": bytes_held(self._own_tensors()), "cache": self._turns.nbytes})

    def shutdown(self) -> None:
        """Let go of the model. Calling it twice is harmless."""
        super().shutdown()
        MegatronGeneration.shutdown(self)
        self._pieces = []
        self._leave.close()

    def _own_tensors(self) -> Iterator[Tensor]:
        for piece in self._pieces:
            yield from (parameter.detach() for parameter in piece.parameters())

    # The thread must not refer to this object, which ends it when nobody else does: closures hold what they need.

    def _running_batch(self, longest: int, version: int) -> RunningBatch:
        stages, turns, options, parking = self._live, self._turns, self._options, self._parking
        limits = BatchLimits(options.max_batch_rows, options.kv_cache_tokens)

        def decoder() -> Decoder:
            parking.require_content("weights")
            return build_decoder(stages, turns, options, limits, longest)

        return RunningBatch(decoder, stages.sampler(), limits, stages.prompt_logprobs, version)

    def _starter(self, device: torch.device) -> Callable[[], RequestBatch]:
        engine = RequestBatch(self._batch, self._limits.begin)

        def start() -> RequestBatch:
            if device.type == "cuda":  # megatron-core asks for the thread's current one
                torch.cuda.set_device(device)
            return engine

        return start
