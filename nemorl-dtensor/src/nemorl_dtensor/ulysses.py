"""Sequence slices for attention heads and back: the exchange of DeepSpeed-Ulysses (arXiv:2309.14509).

# R = rows, W = row width, k = ranks that share a row, S = W / k = tokens of a slice, H and G = heads of queries and of
# keys, d = head size

Each rank has a slice of every row. Before attention an all-to-all gives it the whole rows of H / k heads, after
attention another one gives its tokens back with all heads. So attention is that of whole rows, whatever is masked.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm
from typing import Any

import torch
import torch.distributed as dist
from nemorl_tensors.engines.rows import Tree
from nemorl_tensors.engines.tree_attention import TreePlan, torch_attention, tree_attention
from torch import Tensor

from nemorl_dtensor.attention_common import attention_with_common
from nemorl_dtensor.tree_attention import tree_plan


@dataclass(frozen=True)
class Ulysses:
    """Ranks that share rows by trading tokens for heads."""

    group: dist.ProcessGroup
    """In the order of their slices"""

    @property
    def width_multiple(self) -> int:
        """Of rows, which are cut into one slice a rank."""
        return self.group.size()

    def columns(self, width: int) -> list[int]:
        """This rank's S places in a row."""
        size = width // self.group.size()
        return [*range(self.group.rank() * size, (self.group.rank() + 1) * size)]

    def shared(self, tree: Tree | None, width: int, dtype: torch.dtype, device: torch.device) -> UlyssesRows:
        """What attention must know of rows of that width.

        Args:
            tree: The sequences of a single row; ``None``: each row is one.
            width: W
            dtype: Of the model, and of masks.
            device: Where it computes.
        """
        return UlyssesRows(self.group, None if tree is None else tree_plan(tree, dtype, device))


@dataclass(frozen=True)
class UlyssesRows:
    """Rows that are shared in this way."""

    group: dist.ProcessGroup
    plan: TreePlan | None
    """Which token attends to which, in one row of several sequences; ``None``: each row is one sequence"""

    def attention(self, query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
        """[R, S, H, d'] of [R, H, S, d] queries and [R, G, S, d], [R, G, S, d'] keys and values. Collective, as is the
        gradient."""
        queries, keys, values = by_heads(query, key, value, self.group)
        if self.plan is None:
            answers = torch_attention(queries, keys, values, None, scaling)
        else:
            found_by_token = tree_attention(
                self.plan, queries, keys, values, scaling, torch_attention, attention_with_common
            )
            answers = found_by_token[None]
        return by_slices(answers, self.group)


def by_heads(query: Tensor, key: Tensor, value: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor, Tensor]:
    """Whole rows of this rank's heads, from slices of all heads. Collective, as is the gradient.

    Args:
        query: [R, H, S, d] with H a multiple of k.
        key: [R, G, S, d]. Heads that do not divide over the ranks are repeated until they do; ranks then have copies.
        value: [R, G, S, d'].
        group: The ranks that share the rows, in the order of their slices.

    Returns:
        [R, H / k, W, d] queries, and the keys and values that these heads attend to.
    """
    ranks = group.size()
    copies = lcm(key.shape[1], ranks) // key.shape[1]
    if copies > 1:
        key, value = (states.repeat_interleave(copies, 1) for states in (key, value))
    return _whole_rows(query, group), _whole_rows(key, group), _whole_rows(value, group)


def by_slices(answers: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[R, S, H, d] this rank's tokens with all heads, from [R, W, H / k, d] whole rows. Collective."""
    ranks = group.size()
    rows, width, heads, size = answers.shape
    slices = answers.view(rows, ranks, width // ranks, heads, size).transpose(0, 1)
    received = _exchanged(slices, group)  # [k, R, S, H / k, d]
    return received.permute(1, 2, 0, 3, 4).reshape(rows, width // ranks, ranks * heads, size)


def _whole_rows(states: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[R, H / k, W, d] from [R, H, S, d]"""
    ranks = group.size()
    rows, heads, width, size = states.shape
    parts = states.reshape(rows, ranks, heads // ranks, width, size).transpose(0, 1)
    received = _exchanged(parts, group)  # [k, R, H / k, S, d]
    return received.permute(1, 2, 0, 3, 4).reshape(rows, heads // ranks, ranks * width, size)


def _exchanged(parts: Tensor, group: dist.ProcessGroup) -> Tensor:
    result: Tensor = _Exchange.apply(parts, group)  # type: ignore[no-untyped-call]
    return result


class _Exchange(torch.autograd.Function):
    """Entry i of [k, ...] goes to rank i, and entry i of the result came from it. The gradient goes the same way."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _all_to_all(parts, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _all_to_all(grads[0], ctx.group), None


def _all_to_all(parts: Tensor, group: dist.ProcessGroup) -> Tensor:
    sent = parts.contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return received
