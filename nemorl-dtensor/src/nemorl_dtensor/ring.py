"""Keys and values that travel round a ring of ranks while queries stay: Ring Attention (arXiv:2310.01889).

# R = rows, W = row width, k = ranks that share a row, S = W / k = tokens of a rank, H and G = heads of queries and of
# keys, d and d' = size of a key's and of a value's head

In k steps each rank sees the keys and values of all, its own first, while the next ones are on their way. What a step
finds is merged with what those before found by the logarithms of their sums of exponentials (``attention_lse``). The
backward pass goes round once more: the gradient of keys and values follows them and comes home last. So no rank holds
keys of more than two, and heads need not divide over ranks, as they must to be traded for tokens (``ulysses``).

Which tokens a rank has, and which scores it computes: ``ring_tiles``. Differs from the paper: a rank has an early and a
late part of each row, where the paper's ranks with early parts wait for those with late ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from nemorl_tensors.engines.rows import Tree
from torch import Tensor

from nemorl_dtensor.attention_lse import Part, attention, attention_backward
from nemorl_dtensor.ring_tiles import Tile, chunks_of, runs_of, tiles_of

Tiles = tuple[tuple[Tile, ...], ...]
"""For the keys of each rank, what this one computes with them"""


@dataclass(frozen=True)
class Ring:
    """Ranks that share rows by a ring."""

    group: dist.ProcessGroup
    """In the order in which keys travel"""

    @property
    def width_multiple(self) -> int:
        """Of rows, which are cut into two chunks a rank."""
        return 2 * self.group.size()

    def columns(self, width: int) -> list[int]:
        """This rank's S places in a row."""
        return [column for chunk in chunks_of(self.group.rank(), self.group.size(), width) for column in chunk]

    def shared(self, tree: Tree | None, width: int, dtype: torch.dtype, device: torch.device) -> RingRows:
        """What attention must know of rows of that width.

        Args:
            tree: The sequences of a single row; ``None``: each row is one.
            width: W
            dtype: Of the model; any will do.
            device: Likewise.
        """
        rank, ranks = self.group.rank(), self.group.size()
        return RingRows(self.group, tiles_of(runs_of(tree, width), rank, ranks, width))


@dataclass(frozen=True)
class RingRows:
    """Rows that are shared by a ring."""

    group: dist.ProcessGroup
    tiles: Tiles

    def attention(self, query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
        """[R, S, H, d'] of [R, H, S, d] queries and [R, G, S, d], [R, G, S, d'] keys and values. Collective, as is the
        gradient."""
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        result: Tensor = _Attention.apply(query, key, value, scale, self.tiles, self.group)  # type: ignore[no-untyped-call]
        return result


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float, tiles: Tiles, group: dist.ProcessGroup
    ) -> Tensor:
        rows, heads, tokens, _ = query.shape
        # The memory order of what is returned, so that the next layer keeps the same tensor.
        out = query.new_zeros((rows, tokens, heads, value.shape[-1]), dtype=torch.float32).transpose(1, 2)
        lse = query.new_full((rows, heads, tokens), -torch.inf, dtype=torch.float32)
        for owner, (keys, values) in _around([key, value], group):
            for tile in tiles[owner]:
                q, k = tile.queries, tile.keys
                found = attention(Part(query[:, :, q], keys[:, :, k], values[:, :, k], tile.causal, scale))
                _merge(out[:, :, q], lse[:, :, q], *found)
        answers = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, answers, lse)
        ctx.scale, ctx.tiles, ctx.group = scale, tiles, group
        return answers.transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, answers, lse = ctx.saved_tensors
        grad, group = grads[0].transpose(1, 2), ctx.group
        dq = torch.zeros_like(query, dtype=torch.float32)
        arriving: _Travelling | None = None
        for owner, (keys, values) in _around([key, value], group):
            dk, dv = (torch.zeros_like(states, dtype=torch.float32) for states in (keys, values))
            for tile in ctx.tiles[owner]:
                q, k = tile.queries, tile.keys
                part = Part(query[:, :, q], keys[:, :, k], values[:, :, k], tile.causal, ctx.scale)
                found = attention_backward(part, grad[:, :, q], answers[:, :, q], lse[:, :, q])
                for total, each in zip((dq[:, :, q], dk[:, :, k], dv[:, :, k]), found, strict=True):
                    total.add_(each)
            if arriving is not None:  # what the ranks found that had these keys before
                for total, each in zip((dk, dv), arriving.received(), strict=True):
                    total.add_(each)
            arriving = _Travelling([dk, dv], group)
        assert arriving is not None, "a ring has ranks"
        dk, dv = arriving.received()
        return dq.to(query.dtype), dk.to(key.dtype), dv.to(value.dtype), None, None, None


def _merge(out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor) -> None:
    """Add a part to what was found before: [R, H, Q, d'] answers and [R, H, Q] LSE, both in place."""
    total = torch.logaddexp(lse, part_lse)
    out.mul_(torch.exp(lse - total)[..., None]).add_(part_out * torch.exp(part_lse - total)[..., None])
    lse.copy_(total)


def _around(states: list[Tensor], group: dist.ProcessGroup) -> Iterator[tuple[int, list[Tensor]]]:
    """Each rank of the group with its tensors, this one first. The next ones travel while these are used."""
    rank, ranks = group.rank(), group.size()
    for step in range(ranks):
        arriving = _Travelling(states, group) if step + 1 < ranks else None
        yield (rank - step) % ranks, states
        if arriving is not None:
            states = arriving.received()


class _Travelling:
    """Tensors on their way to the next rank of a ring, and those of the one before on their way here."""

    def __init__(self, states: list[Tensor], group: dist.ProcessGroup) -> None:
        rank, ranks = group.rank(), group.size()
        following, previous = (dist.get_global_rank(group, (rank + step) % ranks) for step in (1, -1))
        self._shapes = [each.shape for each in states]
        self._sent = torch.cat([each.reshape(-1) for each in states])
        self._received = torch.empty_like(self._sent)
        self._works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, self._sent, following, group),
                dist.P2POp(dist.irecv, self._received, previous, group),
            ]
        )

    def received(self) -> list[Tensor]:
        """Those of the rank before, when they are here."""
        for work in self._works:
            work.wait()
        parts = torch.split(self._received, [shape.numel() for shape in self._shapes])
        return [part.view(shape) for part, shape in zip(parts, self._shapes, strict=True)]
