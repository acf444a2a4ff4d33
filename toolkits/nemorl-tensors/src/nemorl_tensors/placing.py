"""A batch at the ranks of a worker group: sent once, then referred to; and what ranks found of its tokens, left there.

# N = tokens of all sequences concatenated

What is sent lives as long as the batch that it was cut from, or one made of it by ``with_tokens``; nobody ends it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from nemorl.contracts.workers import Composed, References, ReferringGroup
from torch import Tensor

from nemorl_tensors.sharding import in_order

if TYPE_CHECKING:
    from nemorl_tensors.batch import TokenBatch


class HeldTokens:
    """[N, …] values of a batch's tokens that lie with its ranks, each in the order of its own sequences.

    Example:
        >>> found = HeldTokens(torch.tensor([1, 2]), [[1], [0]], [torch.tensor([7, 8]), torch.tensor([9])], list)
        >>> found.values.tolist(), found.of([1]).tolist()
        ([9, 7, 8], [7, 8])
    """

    def __init__(
        self,
        lengths: Tensor,
        shards: Sequence[Sequence[int]],
        references: References,
        read: Callable[[References], Sequence[Tensor]],
    ) -> None:
        """
        Args:
            lengths: [B] tokens of each sequence.
            shards: Sequences of each rank; together each of B once.
            references: To the values of each rank.
            read: The values behind references.
        """
        self.shards, self.references = shards, references
        self._lengths, self._read = lengths, read

    @cached_property
    def values(self) -> Tensor:
        """[N, …] in the order of the batch, read from all ranks once."""
        return in_order(self._lengths, self.shards, self._read(self.references))

    def of(self, sequences: Sequence[int]) -> Tensor:
        """The values of some sequences, in their order, read from the ranks that have these."""
        wanted, sizes = set(sequences), self._lengths.tolist()
        ranks = [rank for rank, shard in enumerate(self.shards) if not wanted.isdisjoint(shard)]
        found: dict[int, Tensor] = {}
        for rank, column in zip(ranks, self._read([self.references[rank] for rank in ranks]), strict=True):
            shard = self.shards[rank]
            found |= zip(shard, torch.split(column, [sizes[one] for one in shard]), strict=True)
        return torch.cat([found[one] for one in sequences]) if sequences else self.values[:0]


@dataclass(frozen=True)
class Placed:
    """A batch that the ranks of a worker group can refer to."""

    batch: TokenBatch
    """As it was sent"""
    shards: Sequence[Sequence[int]]
    references: References

    def shows(self, batch: TokenBatch, shards: Sequence[Sequence[int]]) -> bool:
        """Whether all of ``batch`` was sent, cut alike. Tensors are never written to, so the same object is enough."""
        own = self.batch
        alike = (getattr(own, item.name) is getattr(batch, item.name) for item in fields(own) if item.name not in APART)
        return (
            all(alike)
            and _holds(own.token_fields, batch.token_fields)
            and _holds(own.sequence_fields, batch.sequence_fields)
            and self.shards == shards
        )


APART = frozenset({"token_fields", "sequence_fields", "sequences_per_group", "held", "places"})
"""Fields of a batch that may differ from what was sent: they are told with each call, or stay with the driver."""


@dataclass(frozen=True)
class Seen:
    """Makes of the shard that a rank is referred to the part of it that a call is about."""

    token_fields: tuple[str, ...]
    sequence_fields: tuple[str, ...]
    sequences_per_group: int
    held: tuple[str, ...]
    """Names of values that ranks found, which are given beside it"""

    def __call__(self, shard: TokenBatch, *values: Tensor) -> TokenBatch:
        kept = {name: shard.token_fields[name] for name in self.token_fields}
        return replace(
            shard,
            token_fields={**kept, **dict(zip(self.held, values, strict=True))},
            sequence_fields={name: shard.sequence_fields[name] for name in self.sequence_fields},
            sequences_per_group=self.sequences_per_group,
        )


def placed(
    batch: TokenBatch, group: ReferringGroup, shards: Sequence[Sequence[int]], seen: TokenBatch
) -> Composed[TokenBatch]:
    """Of each rank the part of ``seen``, made of what was sent to it and found by it.

    Args:
        batch: Sent whole, unless it was before.
        group: The ranks.
        shards: Sequences of each.
        seen: The batch, or less of it.
    """
    elsewhere = {name: one.values for name, one in seen.held.items() if one.shards != shards}
    if elsewhere:
        batch, seen = batch.with_tokens(**elsewhere), seen.with_tokens(**elsewhere)
    here = next((one for one in batch.places if one.shows(seen, shards)), None)
    if here is None:
        sent = replace(batch, held={}, places=[])
        here = Placed(sent, shards, group.put(sent.parts(shards)))
        batch.places[:] = [*(one for one in batch.places if one.shards != shards), here]
    names = tuple(seen.token_fields), tuple(seen.sequence_fields), seen.sequences_per_group, tuple(seen.held)
    return Composed(Seen(*names), (here.references, *(one.references for one in seen.held.values())))


def _holds(own: Mapping[str, Any], others: Mapping[str, Any]) -> bool:
    return all(own.get(name) is values for name, values in others.items())
