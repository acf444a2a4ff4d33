"""Rows whose tokens are shared out over context-parallel ranks.

# W = tokens of a row, C = tokens of a chunk, k = ranks

A row is cut into 2k chunks of equal size, and rank r has chunks r and 2k - 1 - r: with causal attention an early and a
late chunk together cost the same on every rank. Transformer Engine expects this order, of rows of one sequence each.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from nemorl_tensors.engines.context_rows import own_columns
from nemorl_tensors.engines.rows import Rows
from torch import Tensor


def own_part(rows: Rows, rank: int, ranks: int) -> Rows:
    """A rank's part to compute and score of rows whose width is a multiple of 2k, with the positions of its tokens."""
    chunk = rows.input_ids.shape[1] // (2 * ranks)
    within = torch.arange(chunk, device=rows.input_ids.device)
    columns = torch.cat((rank * chunk + within, (2 * ranks - 1 - rank) * chunk + within))
    return own_columns(rows, columns)[0]


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
