"""Rows whose tokens are shared out over context-parallel ranks: what each computes, and a loss that all compute alike.

# R = rows, W = row width, S = columns of a rank, M = scored tokens

Which columns a rank has is its backend's choice; together the ranks have all, each once.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nemorl_tensors.engines.rows import Rows


def own_columns(rows: Rows, columns: Tensor) -> tuple[Rows, Tensor]:
    """A rank's part of rows: what it computes and scores.

    Args:
        rows: Whole.
        columns: [S] int64 places in each row, in the order in which the rank has them.

    Returns:
        Rows of those columns, with the positions that their tokens have in whole rows and without a tree; and which of
        the M scored tokens their states predict, in order.
    """
    height, width = rows.input_ids.shape
    positions = rows.position_ids
    if positions is None:
        positions = torch.arange(width, device=columns.device).expand(height, width)
    place_of = torch.full((max(1, width),), -1, dtype=torch.int64, device=columns.device)
    place_of[columns] = torch.arange(len(columns), device=columns.device)

    def own(flat: Tensor) -> tuple[Tensor, Tensor]:
        """Which places in the flattened rows are here, and where."""
        row, column = flat // max(1, width), flat % max(1, width)
        here = torch.nonzero(place_of[column] >= 0).squeeze(1)
        return here, (row * len(columns) + place_of[column])[here]

    mine, predictors = own(rows.predictors)
    held, places = own(rows.places)
    part = replace(
        rows,
        input_ids=rows.input_ids[:, columns],
        position_ids=positions[:, columns],
        predictors=predictors,
        targets=rows.targets[mine],
        target_ids=rows.target_ids[mine],
        places=places,
        owners=rows.owners[held],
        routes=None
        if rows.routes is None
        else rows.routes.view(height, width, *rows.routes.shape[1:])[:, columns].flatten(0, 1),
        tree=None,
    )
    return part, mine


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
