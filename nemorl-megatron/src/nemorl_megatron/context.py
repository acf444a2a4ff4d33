"""Rows whose tokens are shared out over context-parallel ranks.

# W = tokens of a row, C = tokens of a chunk, k = ranks

A row is cut into 2k chunks of equal size, and rank r has chunks r and 2k - 1 - r: with causal attention an early and a
late chunk together cost the same on every rank. Transformer Engine expects this order, of rows of one sequence each.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from nemorl_tensors.engines.rows import Rows
from torch import Tensor


def own_part(rows: Rows, rank: int, ranks: int) -> Rows:
    """A rank's part to compute and score of rows whose width is a multiple of 2k, with the positions of its tokens."""
    height, width = rows.input_ids.shape
    chunk = width // (2 * ranks)
    positions = rows.position_ids
    if positions is None:
        positions = torch.arange(width, device=rows.input_ids.device).expand(height, width)
    input_ids, position_ids = (
        whole.reshape(height, 2 * ranks, chunk)[:, [rank, 2 * ranks - 1 - rank]].reshape(height, 2 * chunk)
        for whole in (rows.input_ids, positions)
    )

    def own(places: Tensor) -> tuple[Tensor, Tensor]:
        """Which places are here, and where."""
        column = places % max(1, width)
        number, within = column // max(1, chunk), column % max(1, chunk)
        is_early, is_late = number == rank, number == 2 * ranks - 1 - rank
        mine = is_early | is_late
        return mine, (places // max(1, width) * (2 * chunk) + torch.where(is_late, chunk, 0) + within)[mine]

    mine, predictors = own(rows.predictors)
    is_here, places = own(rows.places)
    return replace(
        rows,
        input_ids=input_ids,
        position_ids=position_ids,
        predictors=predictors,
        targets=rows.targets[mine],
        target_ids=rows.target_ids[mine],
        places=places,
        owners=rows.owners[is_here],
    )


def ends(local_tokens: int, rank: int, ranks: int) -> tuple[int, int]:
    """Tokens of the row up to the end of this rank's early and of its late chunk."""
    chunk = local_tokens // 2
    return (rank + 1) * chunk, (2 * ranks - rank) * chunk


def in_order(local: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[W, ...] all tokens of the rows, of each rank's [W / k, ...]. Collective, as is its gradient, which adds up."""
    gathered = gather_from_sequence_parallel_region(local, tensor_parallel_output_grad=True, group=group)
    ranks = group.size()
    places = [2 * number if number < ranks else 2 * (2 * ranks - 1 - number) + 1 for number in range(2 * ranks)]
    chunks = gathered.view(2 * ranks, -1, *gathered.shape[1:])
    result: Tensor = chunks[places].flatten(0, 1)
    return result


def added_up(parts: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum over ranks, for a loss that every rank computes alike: each takes its own part of the gradient."""
    result: Tensor = _AddedUp.apply(parts, group)  # type: ignore[no-untyped-call]
    return result


class _AddedUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = parts.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None
