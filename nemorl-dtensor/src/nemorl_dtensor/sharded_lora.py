"""Tensor parallelism of a linear layer with adapters: base and adapter are cut the same way.

# O = outputs, I = inputs of a linear layer, R = rank of the adapters

A layer cut by its outputs has B [O, R] cut like the base, and A [R, I] whole; one cut by its inputs has A cut like the
base, and B whole. So what crosses ranks for an adapter has R numbers per token: the states between A and B.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from nemorl_dtensor.model_lora import ADAPTER
from nemorl_dtensor.ranks import local


class WholeLinear(ParallelStyle):
    """The whole weight on every rank, multiplied with the states that this rank has, in their precision."""

    def __init__(self, gradients: Placement) -> None:
        """
        Args:
            gradients: ``Replicate`` where ranks have the same states, ``Partial`` where each has other tokens.
        """
        super().__init__()
        self._gradients = gradients

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, parameter in [*module.named_parameters(recurse=False)]:
            whole = distribute_tensor(parameter.detach(), device_mesh, [Replicate()])
            setattr(module, name, nn.Parameter(whole, requires_grad=parameter.requires_grad))
        module.forward = partial(_product, module, self._gradients)
        return module


def _product(module: nn.Module, gradients: Placement, states: Tensor) -> Tensor:
    weight, given = module.weight, local(states)
    assert isinstance(weight, DTensor), "it was distributed"
    return torch.nn.functional.linear(given, weight.to_local(grad_placements=[gradients]).to(given.dtype))


def columns_plan(name: str) -> dict[str, ParallelStyle]:
    """Styles of an adapted layer that is cut by its outputs, by module; every rank has its whole input."""
    return {
        f"{name}.base_layer": ColwiseParallel(),
        f"{name}.lora_A.{ADAPTER}": WholeLinear(Replicate()),
        f"{name}.lora_B.{ADAPTER}": ColwiseParallel(),
    }


def rows_plan(name: str, outputs: Placement) -> dict[str, ParallelStyle]:
    """Styles of an adapted layer that is cut by its inputs, by module.

    Args:
        name: Of the layer.
        outputs: What a rank gets of the output: all of it, or its part of the sequence.
    """
    has_same_tokens = isinstance(outputs, Replicate)
    return {
        f"{name}.base_layer": RowwiseParallel(output_layouts=outputs),
        f"{name}.lora_A.{ADAPTER}": RowwiseParallel(output_layouts=outputs),
        f"{name}.lora_B.{ADAPTER}": WholeLinear(Replicate() if has_same_tokens else Partial()),
    }
