"""Weights in the order of a CPU's kernels, which vLLM 0.32 packs as they are loaded.

Every linear layer, embedding and output head has such a copy inside the function that multiplies with it
(``layer.cpu_linear``). Linear layers have nothing else: their parameter is empty. Some kernels pack into a tensor,
which moves like any other; oneDNN, which packs all matrices where there is no AMX and large ones elsewhere, keeps its
copy to itself: it can be counted, and let go of with the function, but neither read nor moved.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import FunctionType
from typing import Any

from nemorl_tensors.engines.parking import forgotten_error
from torch import Tensor, nn
from vllm._custom_ops import CPUDNNLGEMMHandler


def packed_tensors(model: nn.Module) -> Iterator[Tensor]:
    """Packed copies that are tensors."""
    for _, copy in _copies(model):
        if isinstance(copy, Tensor):
            yield copy


def hidden_bytes(model: nn.Module) -> int:
    """Bytes of the matrices that oneDNN has packed, without what it pads them with."""
    return sum(_hidden_bytes(layer, copy) for layer, copy in _copies(model) if isinstance(copy, CPUDNNLGEMMHandler))


def forget_packed(model: nn.Module) -> None:
    """Free all packed copies. An update of the weights packs those that it brings."""
    for layer in [layer for layer, _ in _copies(model)]:
        layer.cpu_linear = _refuse


def _copies(model: nn.Module) -> Iterator[tuple[Any, object]]:
    for layer in model.modules():
        multiply = vars(layer).get("cpu_linear")
        # Where nothing is packed it is torch's own function, or one that closes over nothing.
        cells = multiply.__closure__ or () if isinstance(multiply, FunctionType) else ()
        for cell in cells:
            yield layer, cell.cell_contents


def _hidden_bytes(layer: Any, handler: CPUDNNLGEMMHandler) -> int:
    size: int = handler.k * handler.n * layer.weight.dtype.itemsize
    return size


def _refuse(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    raise forgotten_error("weights")
