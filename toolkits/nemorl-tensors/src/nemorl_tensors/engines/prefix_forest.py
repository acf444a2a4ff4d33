"""The prefix forest of a batch: beginnings that its sequences share, found by comparing token ids.

# B = sequences, U = units: sequences that stay together (one, or a preference pair)

Sequences in lexicographic order stand beside those that they share most with: ``common[i]``, the tokens that sequence i
has in common with the one before it, describes the whole forest. Its tokens are ``sum(lengths - common)``; what two
sequences i < j share is the least ``common`` of i + 1 … j. Everything here is numpy over ids: no model, no device.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy
import numpy.typing

from nemorl_tensors.batch import TokenBatch
from nemorl_tensors.engines.rows import fed_lengths, first_fit_decreasing

Ints = numpy.typing.NDArray[numpy.int64]

MIN_RATIO = 1.2
"""Tokens of the sequences per token of their forest from which the shared layout is worth its attention."""
BIG_ENDIAN = numpy.dtype(">u8")
COMPARED_TOKENS = 2**20
"""Tokens of neighbours that are compared at one time: 8 MiB each."""
MAX_JOINED = 8
"""Pieces of a tree are joined where one's tokens are less than this many times those that it shares."""
SHARD_PARTS = (1, 2, 4, 8)
"""Pieces per rank, on average, that a forest is cut into when whole trees do not balance."""


@dataclass(frozen=True)
class PrefixForest:
    """Sequences in lexicographic order, with what each shares with the one before."""

    order: Ints
    """[B] index of each sequence"""
    lengths: Ints
    """[B] tokens of each, in this order"""
    common: Ints
    """[B] leading tokens that each has in common with the one before it; 0 at the first"""

    @classmethod
    def of(cls, token_ids: Ints, starts: Ints, lengths: Ints) -> PrefixForest:
        """The forest of the first ``lengths`` tokens of each sequence.

        Args:
            token_ids: [N] ids of all sequences.
            starts: [B] where each begins.
            lengths: [B] tokens of each that count. Sequences without any are left out.
        """
        # Bytes compare as the numbers do where the big end comes first.
        text, width = token_ids.astype(BIG_ENDIAN).tobytes(), BIG_ENDIAN.itemsize
        spans = [slice(first * width, (first + count) * width) for first, count in zip(starts, lengths, strict=True)]
        chosen = numpy.flatnonzero(lengths > 0).tolist()
        order = numpy.array(sorted(chosen, key=lambda i: text[spans[i]]), dtype=numpy.int64)
        return cls(order, lengths[order], _common(token_ids, starts[order], lengths[order]))

    @classmethod
    def of_batch(cls, batch: TokenBatch) -> PrefixForest:
        """The forest of what a model must see of a batch: each sequence up to its last scored token."""
        lengths = batch.lengths.cpu().numpy()
        return cls.of(batch.token_ids.cpu().numpy(), lengths.cumsum() - lengths, fed_lengths(batch).cpu().numpy())

    @property
    def sequence_tokens(self) -> int:
        """Tokens of the sequences."""
        return int(self.lengths.sum())

    @property
    def tokens(self) -> int:
        """Tokens of the forest: each one that sequences have in common counts once."""
        return int((self.lengths - self.common).sum())

    @property
    def ratio(self) -> float:
        """Tokens of the sequences per token of the forest; 1.0 if there are none."""
        return self.sequence_tokens / self.tokens if self.tokens else 1.0

    def pieces(self, budget: float, sequences_per_unit: int = 1) -> list[tuple[list[int], int]]:
        """Cut into (units, tokens of their forest) of at most ``budget`` tokens each, larger units alone.

        A tree that fits stays whole; one that does not is cut where its branches share least, and its pieces are joined
        again, neighbour by neighbour, as long as they fit: so a group too large is cut by leaves, and each piece has
        the tokens above it once.

        Args:
            budget: Tokens.
            sequences_per_unit: Neighbouring sequences of the batch that are never parted.
        """
        units = self if sequences_per_unit == 1 else _units(self, sequences_per_unit)
        return [(units.order[low:high].tolist(), units._cost(low, high)) for low, high in _cut(units, budget)]

    def _cost(self, low: int, high: int) -> int:
        """Tokens of the forest of the sequences low … high - 1."""
        return int(self.common[low] + (self.lengths[low:high] - self.common[low:high]).sum())


def plan_trees(batch: TokenBatch, forest: PrefixForest, budget: int) -> list[list[int]]:
    """Sequence indices per microbatch, up to ``budget`` tokens of their forest each.

    Sequences without a scored token, which cost nothing, are in the last.
    """
    width = batch.sequences_per_group
    pieces = sorted(forest.pieces(budget, width), key=lambda piece: piece[1], reverse=True)
    bins = first_fit_decreasing([tokens for _, tokens in pieces], budget)
    plan = [[unit for place in members for unit in pieces[place][0]] for members in bins] or [[]]
    seen = {unit for members in plan for unit in members}
    plan[-1] += [unit for unit in range(len(batch) // width) if unit not in seen]
    return [_sequences(members, width) for members in plan if members]


def shard_trees(batch: TokenBatch, count: int) -> list[list[int]] | None:
    """Sequence indices for each of ``count`` ranks: trees whole, balanced by tokens of the forest.

    Trees are cut by leaves, and more so, as long as that lightens the heaviest rank. ``None``: sequences share too
    little to stay together for it.

    Example:
        >>> ids, mask = [[1, 2, 3, 4], [1, 2, 3, 5], [6, 7, 8, 9]], [False, True, True, True]
        >>> group = TokenBatch.from_sequences(ids, [mask] * 3)
        >>> shard_trees(group, 2)
        [[0, 1], [2]]
    """
    width, forest = batch.sequences_per_group, PrefixForest.of_batch(batch)
    if forest.ratio <= MIN_RATIO:
        return None
    budgets = (float("inf"), *(forest.tokens / count / parts for parts in SHARD_PARTS), 0)
    found = [_balanced(forest.pieces(budget, width), count) for budget in budgets]
    shards = min(found, key=lambda attempt: attempt[0])[1]
    seen = {unit for members in shards for unit in members}
    rest = [unit for unit in range(len(batch) // width) if unit not in seen]
    for place, unit in enumerate(rest):  # nothing of them is computed
        shards[place % count].append(unit)
    return [_sequences(sorted(members), width) for members in shards]


def _balanced(pieces: list[tuple[list[int], int]], count: int) -> tuple[int, list[list[int]]]:
    """The tokens of the heaviest rank, and the units of each: the largest piece first, to the emptiest rank."""
    loads = [0] * count
    shards: list[list[int]] = [[] for _ in range(count)]
    for units, tokens in sorted(pieces, key=lambda piece: piece[1], reverse=True):
        rank = loads.index(min(loads))
        loads[rank] += tokens
        shards[rank] += units
    return max(loads), shards


def _cut(forest: PrefixForest, budget: float) -> list[tuple[int, int]]:
    """Ranges of the order, each a subtree or neighbouring subtrees, of at most ``budget`` tokens."""
    done: list[tuple[int, int]] = []
    open_ranges = [(0, len(forest.order))] if len(forest.order) else []
    while open_ranges:
        low, high = open_ranges.pop()
        inner = forest.common[low + 1 : high]
        is_tree = high - low == 1 or inner.min() > 0
        if is_tree and (high - low == 1 or forest._cost(low, high) <= budget):
            # Pieces that share little are not joined, so that they can be packed one by one.
            is_close = forest.common[low] * MAX_JOINED > forest._cost(low, high)
            if done and is_close and forest._cost(done[-1][0], high) <= budget:
                low = done.pop()[0]
            done.append((low, high))
            continue
        bounds = [low, *(numpy.flatnonzero(inner == inner.min()) + low + 1).tolist(), high]
        open_ranges += reversed(list(itertools.pairwise(bounds)))
    return done


def _units(forest: PrefixForest, width: int) -> PrefixForest:
    """The forest with units in place of sequences; ``common`` is at most what a unit shares with the one before."""
    places: dict[int, list[int]] = {}
    for place, sequence in enumerate(forest.order.tolist()):
        places.setdefault(sequence // width, []).append(place)

    def shared(one: int, other: int) -> int:
        low, high = min(one, other), max(one, other)
        return int(forest.common[low + 1 : high + 1].min())

    order = list(places)
    lengths, common = [], []
    last: int | None = None
    for members in places.values():
        saved = sum(shared(one, other) for one, other in itertools.pairwise(members))
        lengths.append(int(forest.lengths[members].sum()) - saved)
        common.append(0 if last is None else shared(last, members[0]))
        last = members[0]
    return PrefixForest(*(numpy.array(values, dtype=numpy.int64) for values in (order, lengths, common)))


def _sequences(units: Sequence[int], width: int) -> list[int]:
    return [unit * width + offset for unit in units for offset in range(width)]


def _common(token_ids: Ints, starts: Ints, lengths: Ints) -> Ints:
    """[B] leading tokens that each sequence has in common with the one before it; 0 at the first."""
    common = numpy.zeros(len(starts), dtype=numpy.int64)
    depths = numpy.arange(int(lengths.max(initial=0)), dtype=numpy.int64)
    for low in range(1, len(starts), max(1, COMPARED_TOKENS // max(1, len(depths)))):
        part = slice(low, low + max(1, COMPARED_TOKENS // max(1, len(depths))))
        before = slice(low - 1, part.stop - 1)
        count = len(starts[part])
        shorter = numpy.minimum(lengths[part], lengths[before][:count])[:, None]
        places = numpy.minimum(depths, shorter - 1)
        one, other = (token_ids[starts[rows][:count, None] + places] for rows in (before, part))
        differs = numpy.append((one != other) | (depths >= shorter), numpy.ones((count, 1), dtype=bool), axis=1)
        common[part] = differs.argmax(axis=1)
    return common
