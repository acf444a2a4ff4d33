"""Weights from nemorl's transports into vLLM, as an engine of vLLM's own weight-transfer interface.

vLLM starts, feeds and finishes an update (``vllm.distributed.weight_transfer``), on any device and in every process of
a tensor-parallel engine; this says how the tensors of a ``WeightHandle`` become the model's. Fetching them is not part
of it (``worker``): an update that cannot be fetched must not begin.

In a server, whose trainer is another program (``nemorl-agents``), tensors come by broadcast. Requests to its
``/init_weight_transfer_engine`` and ``/update_weights`` have the fields of vLLM's own backend ``nccl``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from nemorl.errors import BackendError
from nemorl_tensors.engines.broadcast import BroadcastGroup, Meeting
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import materialize_layer
from vllm.platforms import current_platform

from nemorl_vllm.engine import WEIGHT_TRANSFER

Buckets = Iterable[Mapping[str, torch.Tensor]]

SENDER_TIMEOUT_S = 600.0
"""Longest wait for a sender's next tensor. It knows of lost workers by itself, and opens another group."""

WRITES_PAST_LOADERS = frozenset({"gpt_oss"})
"""Architectures whose ``load_weights`` copies experts and attention sinks into place by itself: a reload, which waits
for the loaders of each parameter, sees nothing of it."""


@dataclass
class SenderAddress(WeightTransferInitInfo):
    """Where the members of a group meet that a sender opens."""

    master_address: str
    master_port: int
    rank_offset: int
    """Of the first worker of the engine"""
    world_size: int
    """Workers and sender"""


@dataclass
class FetchedWeights(WeightTransferUpdateInfo):
    """One whole version."""

    buckets: Buckets
    """Tensors under their Hugging Face names"""


@dataclass
class AnnouncedWeights(WeightTransferUpdateInfo):
    """One whole version, whose tensors the sender is about to broadcast in this order."""

    names: list[str]
    dtype_names: list[str]
    """torch's, without ``torch.``"""
    shapes: list[list[int]]


class HandleTransfer(WeightTransferEngine[SenderAddress, FetchedWeights]):
    """Loads whole versions, from tensors in the form of the checkpoint, in place."""

    init_info_cls = SenderAddress
    update_info_cls = FetchedWeights
    _group: BroadcastGroup | None = None

    def init_transfer_engine(self, init_info: SenderAddress) -> None:
        """Join the group of a sender, in place of the one before."""
        self.shutdown()
        parallel = self.parallel_config
        rank = init_info.rank_offset + parallel.data_parallel_index * parallel.world_size + parallel.rank
        meeting = Meeting(init_info.master_address, init_info.master_port, init_info.world_size)
        self._group = BroadcastGroup(meeting, rank, timeout_s=SENDER_TIMEOUT_S)

    @torch.no_grad()
    def start_weight_update(self) -> None:
        self._expected = {name for name, _ in self.model.named_parameters()}
        self._head_biases: list[tuple[ParallelLMHead, torch.nn.Parameter]] = []
        # Weights that were repacked for the CPU, fused or quantised have lost their loaders. This brings each layer
        # back to what its checkpoint looks like, and repacks into the same memory once the layer is complete.
        initialize_layerwise_reload(self.model)
        # Scales of rounded weights are made from these, not sent.
        self._expected &= {name for name, _ in self.model.named_parameters()}
        if current_platform.is_cpu():
            for layer in filter(_has_experts, self.model.modules()):
                # Its kernel multiplies with padded and repacked experts, which vLLM makes together with the kernel.
                layer.quant_method.moe_kernel = None
        for layer in self._written_past_loaders():
            materialize_layer(layer, get_layerwise_info(layer))

    def update_weights(self, update_info: dict[str, Any]) -> None:
        if "names" in update_info:
            self._receive_announced(AnnouncedWeights(**update_info))
        else:
            self.receive_weights(self.parse_update_info(update_info))
        if self.device.type == "cuda":  # vLLM's own asks for an accelerator, which a CPU is not
            torch.cuda.synchronize(self.device)

    def _receive_announced(self, announced: AnnouncedWeights) -> None:
        try:
            self.receive_weights(FetchedWeights(self._broadcast(announced)))
        except BaseException:
            self.finish_weight_update()  # vLLM takes the update for closed; half-done layers would let no other begin
            raise

    def _broadcast(self, announced: AnnouncedWeights) -> Iterator[Mapping[str, torch.Tensor]]:
        if self._group is None:
            raise BackendError("no sender is known", fix="call /init_weight_transfer_engine first")
        for name, dtype, shape in zip(announced.names, announced.dtype_names, announced.shapes, strict=True):
            empty = torch.empty(shape, dtype=getattr(torch, dtype), device=self._group.device)
            yield {name: self._group.broadcast(empty)}

    @torch.no_grad()
    def receive_weights(self, update_info: FetchedWeights) -> None:
        """
        Raises:
            BackendError: Names or shapes are not those of the model, or some are missing.
        """
        model: Any = self.model
        try:
            loaded = model.load_weights(_named_tensors(update_info.buckets))
        except Exception as error:
            raise BackendError(
                f"vLLM cannot load the trainer's weights: {type(error).__name__}: {error}",
                fix="train and generate with the same model, and export Hugging Face names",
            ) from error
        missing = sorted(self._expected - set(loaded)) if loaded is not None else []
        if missing:
            raise BackendError(
                f"the trainer sent no weights for {len(missing)} parameters: {', '.join(missing[:5])}",
                fix="export every parameter under its Hugging Face name",
            )
        # Some models get the bias of their head with their first weights. It is not among what a reload puts back.
        heads = [layer for layer in model.modules() if isinstance(layer, ParallelLMHead)]
        self._head_biases = [(head, head.bias) for head in heads if head._parameters.get("bias") is not None]
        for layer in self._written_past_loaders():
            get_layerwise_info(layer).load_numel = 1  # something was loaded: it is packed when the update is finished
        stale = _not_reached(model)
        if stale:
            raise BackendError(
                f"vLLM took weights for {len(stale)} parameters and did not load them: {', '.join(stale[:5])}",
                fix=f"vLLM cannot exchange weights of {self._architecture} in place: use generation.backend: hf",
            )

    @property
    def _architecture(self) -> str:
        """transformers' ``model_type``."""
        return str(self.model_config.hf_text_config.model_type)

    def _written_past_loaders(self) -> list[Any]:
        if self._architecture not in WRITES_PAST_LOADERS:
            return []
        return [layer for layer in self.model.modules() if _has_experts(layer) or "sinks" in layer._parameters]

    @torch.no_grad()
    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        for head, bias in self._head_biases:
            if head._parameters.get("bias") is None:
                head.register_parameter("bias", bias)
        _repack_tied_heads(self.model)

    def shutdown(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None


WeightTransferEngineFactory.register_engine(WEIGHT_TRANSFER, HandleTransfer)


def _named_tensors(buckets: Buckets) -> Iterator[tuple[str, torch.Tensor]]:
    for bucket in buckets:
        for name, tensor in bucket.items():
            yield name, tensor.detach()


def _has_experts(layer: Any) -> bool:
    return isinstance(getattr(layer, "quant_method", None), UnquantizedFusedMoEMethod)


def _not_reached(model: torch.nn.Module) -> list[str]:
    """Parameters of the layers none of whose loaders was called: vLLM would go on with what they held before."""
    heads = {name for name, layer in model.named_modules() if isinstance(layer, VocabParallelEmbedding)}
    found = []
    for name, layer in model.named_modules():
        info = get_layerwise_info(layer)
        if info.can_load() and info.load_numel == 0 and name not in heads:
            found += [f"{name}.{leaf}" for leaf, tensor in layer._parameters.items() if tensor is not None]
    return found


def _repack_tied_heads(model: torch.nn.Module) -> None:
    """Pack output heads again from the embeddings that they share.

    On the CPU a head multiplies with a packed copy. The reload renews that of a layer which received weights itself; a
    tied head receives none, and would go on with the copy of the weights before.
    """
    if not current_platform.is_cpu():
        return
    for module in model.modules():
        if isinstance(module, VocabParallelEmbedding) and "cpu_linear" in vars(module):
            dispatch_cpu_unquantized_gemm(module, remove_weight=False)
