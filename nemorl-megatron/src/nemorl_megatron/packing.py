"""Rows that hold many sequences one after the other: what megatron-core's layers are told about them.

# W = tokens of the row, over all context-parallel ranks; Q = sequences, what pads the row included

megatron-core calls this layout ``thd``: its layers drop the axis of rows, and attention is told where sequences begin,
or, where they share tokens (``nemorl_tensors.engines.tree_rows``), which tokens are whose.
Rotary embeddings follow ``position_ids`` (``rope``), every other layer sees tokens and no sequences.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from nemorl_tensors.devices import on_device
from nemorl_tensors.engines.rows import Tree
from nemorl_tensors.engines.tree_attention import TreePlan
from torch import Tensor


class Span(NamedTuple):
    """The tokens of one sequence in a part of the row."""

    sequence: int
    tokens: int
    """In the part."""
    seen: int
    """Of the sequence, up to the last one in the part."""


@dataclass
class Packing(PackedSeqParams):  # type: ignore[misc]
    """Where the sequences of one row begin: boundaries as attention kernels read them, and as numbers of Python."""

    lengths: tuple[int, ...] = ()
    """[Q], which add up to W; none in a row with a tree"""
    tree: TreePlan | None = None
    """Of a row in which sequences share tokens, instead of boundaries."""

    @classmethod
    def of_tree(cls, tree: Tree, dtype: torch.dtype) -> Packing:
        """That of a row with a tree, for attention in a precision."""
        return cls(qkv_format="thd", tree=TreePlan.of(tree, dtype))

    @classmethod
    def of(cls, position_ids: Tensor) -> Packing:
        """That of a row [1, W] whose positions restart at 0 where a sequence begins."""
        starts = torch.nonzero(position_ids[0] == 0).squeeze(1)
        ends = torch.cat((starts, starts.new_full((1,), position_ids.shape[1])))
        lengths: list[int] = ends.diff().tolist()
        boundaries, longest = ends.int(), max(lengths)
        return cls(
            qkv_format="thd",
            cu_seqlens_q=boundaries,
            cu_seqlens_kv=boundaries,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            lengths=tuple(lengths),
        )

    def to(self, device: torch.device | str) -> Packing:
        """This packing on another device."""
        return on_device(replace(self, tree=self.tree and self.tree.to(device)), device)

    def spans(self, first: int, end: int) -> list[Span]:
        """The sequences that have tokens in the part ``first`` ... ``end - 1`` of the row, in order."""
        found: list[Span] = []
        start = 0
        for sequence, length in enumerate(self.lengths):
            inside = min(end, start + length) - max(first, start)
            if inside > 0:
                found.append(Span(sequence, inside, min(end, start + length) - start))
            start += length
        return found
