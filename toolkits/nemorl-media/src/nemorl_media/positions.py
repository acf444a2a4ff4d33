"""Positions in three dimensions (M-RoPE, arXiv:2409.12191), from token ids alone.

# R = rows, W = row width, S = sequences of a tree, L = longest one

A token of text has three equal positions, one after those before it. The tokens of an item have the position of its
start plus their frame, row and column; what follows goes on after the largest of them. So an item of n tokens whose
longest side is m takes up m positions: what comes after it stands ``n - m`` before its place in the sequence.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from nemorl.media import FIRST_ID, MAX_TOKENS, PLACE_BITS
from nemorl_tensors.engines.rows import Rows
from torch import Tensor

Grid = tuple[int, int, int]
"""Frames, rows, columns of an item's tokens."""


def positions_in_3d(rows: Rows, grids: Mapping[int, Grid]) -> Tensor:
    """[3, R, W] int64 frame, row and column of each token, of rows in any layout.

    Args:
        rows: With the ids of items.
        grids: Of items, by name. Tokens of others have the positions of text.
    """
    ids = rows.input_ids
    columns = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    depths = columns if rows.position_ids is None else rows.position_ids
    if not grids:
        return depths.expand(3, -1, -1)
    place, (sizes_I3, names_I) = ids & (MAX_TOKENS - 1), _sizes(grids, ids.device)
    found = torch.searchsorted(names_I, ids >> PLACE_BITS).clamp(max=len(names_I) - 1)
    is_item = (ids >= FIRST_ID) & (names_I[found] == ids >> PLACE_BITS)
    frames, height, width = sizes_I3[found].unbind(-1)
    count, side = frames * height * width, torch.maximum(frames, torch.maximum(height, width))
    saved = torch.where(is_item & (place == count - 1), count - side, 0)
    flat = depths - _before(rows, saved, columns - depths)
    within = torch.stack((place // (height * width), place // width % height, place % width))
    return torch.where(is_item, flat - place + within, flat)


def _sizes(grids: Mapping[int, Grid], device: torch.device) -> tuple[Tensor, Tensor]:
    """[I, 3] sizes of items in the order of their names, and [I] these names."""
    ordered = sorted(grids)
    sizes = torch.tensor([grids[name] for name in ordered], dtype=torch.int64, device=device).view(-1, 3)
    return sizes, torch.tensor(ordered, dtype=torch.int64, device=device)


def _before(rows: Rows, values_RW: Tensor, starts_RW: Tensor) -> Tensor:
    """[R, W] sum of the values of the tokens that stand before each one in its sequence.

    Args:
        rows: Whose sequences.
        values_RW: Of each token.
        starts_RW: Where its sequence begins in the row, unless tokens are shared.
    """
    if rows.tree is None:
        sums = values_RW.cumsum(1) - values_RW
        return sums - sums.gather(1, starts_RW)
    slots_SL = rows.tree.slots
    lengths_S1 = torch.tensor(rows.tree.lengths, device=slots_SL.device)[:, None]
    is_real_SL = torch.arange(slots_SL.shape[1], device=slots_SL.device) < lengths_S1
    values_SL = torch.where(is_real_SL, values_RW[0][slots_SL], 0)
    sums = torch.zeros_like(values_RW)
    # What a token has before it is the same in all sequences that share it.
    sums[0, slots_SL[is_real_SL]] = (values_SL.cumsum(1) - values_SL)[is_real_SL]
    return sums
