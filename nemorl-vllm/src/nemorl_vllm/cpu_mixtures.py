"""Mixtures over several processes of a CPU, for which vLLM 0.32 lacks two pieces.

Its communicator there has no exchange of unequal parts, without which ranks that serve requests of their own cannot
share experts (``CpuCommunicator.all_gatherv`` and ``reduce_scatterv`` are those of the base class and raise
``NotImplementedError``). Its kernel of experts takes the number of an expert among all for its number among those of
this process (``CPUUnquantizedExperts.apply`` leaves ``expert_map`` unread), and reads past the end of its weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts


def supply_missing() -> None:
    """Add both to vLLM, unless it has them."""
    if "all_gatherv" not in vars(CpuCommunicator):
        CpuCommunicator.all_gatherv = _all_gatherv
        CpuCommunicator.reduce_scatterv = _reduce_scatterv
    if CPUUnquantizedExperts.apply is not _apply:
        CPUUnquantizedExperts.apply = _apply


def _all_gatherv(
    self: CpuCommunicator, input_: Tensor | Sequence[Tensor], dim: int = 0, sizes: Sequence[int] | None = None
) -> Tensor | list[Tensor]:
    """Rows of all ranks, in order of the ranks. gloo gathers equal parts alone, so short ones are padded on the way."""
    assert dim == 0
    if not isinstance(input_, Tensor):
        return [_gathered(self, tensor, sizes) for tensor in input_]
    return _gathered(self, input_, sizes)


def _gathered(communicator: CpuCommunicator, rows: Tensor, sizes: Sequence[int] | None) -> Tensor:
    counts = [len(rows)] * communicator.world_size if sizes is None else list(sizes)
    padded = rows.new_zeros(max(counts), *rows.shape[1:])
    padded[: len(rows)] = rows
    parts = [torch.empty_like(padded) for _ in counts]
    torch.distributed.all_gather(parts, padded, group=communicator.device_group)
    return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])


def _reduce_scatterv(self: CpuCommunicator, input_: Tensor, dim: int = 0, sizes: Sequence[int] | None = None) -> Tensor:
    """The sum over all ranks of the rows that belong to this one."""
    assert dim == 0
    total = input_.clone(memory_format=torch.contiguous_format)
    torch.distributed.all_reduce(total, group=self.device_group)
    counts = [len(total) // self.world_size] * self.world_size if sizes is None else list(sizes)
    rank = self.rank_in_group
    begin = sum(counts[:rank])
    return total[begin : begin + counts[rank]].clone()


_apply_to_all = CPUUnquantizedExperts.apply


def _apply(
    self: CPUUnquantizedExperts, *, topk_weights: Tensor, topk_ids: Tensor, expert_map: Tensor | None, **arguments: Any
) -> None:
    """What the experts of this process make of each token: others count as its first one, with weight 0."""
    if expert_map is not None:
        here = expert_map[topk_ids.long()]  # -1 where it is in another process
        topk_weights = torch.where(here >= 0, topk_weights, 0.0)
        topk_ids = here.clamp(min=0).to(topk_ids.dtype)
    _apply_to_all(self, topk_weights=topk_weights, topk_ids=topk_ids, expert_map=expert_map, **arguments)
