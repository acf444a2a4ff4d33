"""The gradient of a loss against finite differences, in float64.

# N = tokens of all sequences concatenated, K = outputs of a token

What a loss detaches it means to hold fixed: importance weights, an old policy that is the one at hand, estimators
with a gradient of their own. So what is detached where the gradient is taken is kept, and given back at the points
beside it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from nemorl_tensors import TokenBatch
from torch import Tensor
from torch.overrides import TorchFunctionMode

STEP = 1e-5
"""Nats to either side. The error of a central difference is of order 1e-10, that of float32 1e-2."""
TOLERANCE = 1e-4


class Held(TorchFunctionMode):
    """Keeps what is detached, or computed without gradient, in the first run; later runs get it in the same order."""

    DETACHING: Any = (Tensor.detach, torch.detach, Tensor.data.__get__)  # type: ignore[attr-defined]

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Tensor] = []
        self.next: int | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        is_held = func in self.DETACHING or not torch.is_grad_enabled()
        if not is_held or not isinstance(result, Tensor) or not result.is_floating_point():
            return result
        if self.next is None:
            self.kept.append(result.clone())
            return result
        self.next += 1
        before = self.kept[self.next - 1] if self.next <= len(self.kept) else result
        return before.clone() if before.shape == result.shape else result


def in_float64(outputs: Tensor, batch: TokenBatch) -> tuple[Tensor, TokenBatch]:
    def widened(fields: Any) -> Any:
        return {name: field.double() if field.is_floating_point() else field for name, field in fields.items()}

    fields = {"token_fields": widened(batch.token_fields), "sequence_fields": widened(batch.sequence_fields)}
    return outputs.double(), replace(batch, loss_weights=batch.loss_weights.double(), **fields)


def gradient_is_that_of_the_value(loss: Any, outputs: Tensor, batch: TokenBatch) -> None:
    """In float64 the gradient is that of finite differences, what the loss detaches held fixed."""
    outputs, batch = in_float64(outputs, batch)
    leaf, held = outputs.clone().requires_grad_(), Held()
    with held:
        value = loss(leaf.clone(), batch)[0]
    assert value.requires_grad, "its value has no gradient"
    (gradient,) = torch.autograd.grad(value.sum(), leaf)

    def at(place: Any, step: float) -> float:
        moved = outputs.clone()
        moved[place] += step
        held.next = 0
        with held:
            return float(loss(moved.requires_grad_().clone(), batch)[0].detach())

    for place in map(tuple, batch.mask.reshape(-1, *[1] * (outputs.ndim - 1)).expand_as(outputs).nonzero().tolist()):
        middle, below, above = at(place, 0.0), at(place, -STEP), at(place, STEP)
        slopes, found = sorted(((middle - below) / STEP, (above - middle) / STEP)), float(gradient[place])
        # At a kink the gradient is one of those between both sides.
        room = TOLERANCE * max(1.0, abs(slopes[0]), abs(slopes[1]))
        assert slopes[0] - room <= found <= slopes[1] + room, (
            f"the gradient by output {list(place)} is {found:.6g}, finite differences say {sum(slopes) / 2:.6g}"
        )
