"""What attends to what in rows that ranks share, as rectangles and triangles without a mask: what a ring computes.

# W = columns of a row, k = ranks that share it, C = W / 2k = columns of a chunk, S = 2C = columns of a rank

In a row of sequences that share beginnings, laid out in lexicographic order (``engines.tree_rows``), a token is seen by
itself and by columns up to the end of the last sequence that has it. So tokens with the same end form a *run*, whose
scores are a triangle over the run itself and a rectangle below it; FlashMask (arXiv:2410.01359) describes masks by such
ends of columns. A row of one sequence is one run, a packed row one for each sequence.

Rank r has the chunks r and 2k - 1 - r of each row (zigzag): an early and a late one, so that causal attention costs the
same on every rank. Chunks cut runs, and so rectangles and triangles, into tiles.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from nemorl_tensors.engines.rows import Tree


class Run(NamedTuple):
    """Neighbouring tokens ``start`` to ``stop`` that the columns up to ``end`` see, each from its own on."""

    start: int
    stop: int
    end: int


class Tile(NamedTuple):
    """Scores that are computed by one call, of queries of one rank with keys of another."""

    queries: slice
    """Of the rank's S columns"""
    keys: slice
    """Of the other's"""
    causal: bool
    """Queries and keys are the same tokens, each of which sees those up to itself; else all see all"""


def runs_of(tree: Tree | None, width: int) -> list[Run]:
    """The runs of a row.

    Args:
        tree: Its sequences in lexicographic order; ``None``: it is one sequence.
        width: W

    Example:
        Prompt [0, 1], responses [2, 3] and [4], of which each sees the prompt and itself:

        >>> import torch
        >>> tree = Tree(torch.tensor([[0, 1, 2, 3], [0, 1, 4, 0]]), (4, 3), (4, 1))
        >>> [tuple(run) for run in runs_of(tree, 5)]
        [(0, 2, 5), (2, 4, 4), (4, 5, 5)]
    """
    if tree is None:
        return [Run(0, width, width)]
    found: list[Run] = []
    path: list[tuple[int, int]] = []  # columns that the sequence at hand may share, in pieces from its root on
    column = 0
    for length, new in zip(tree.lengths, tree.new, strict=True):
        surplus = sum(stop - start for start, stop in path) - (length - new)
        while surplus > 0:  # tokens that this sequence has not end here
            start, stop = path.pop()
            cut = max(start, stop - surplus)
            found.append(Run(cut, stop, column))
            surplus -= stop - cut
            if cut > start:
                path.append((start, cut))
        if new:
            path.append((column, column + new))
        column += new
    return sorted([*found, *(Run(start, stop, column) for start, stop in path)])


def chunks_of(rank: int, ranks: int, width: int) -> tuple[range, range]:
    """The columns of a rank, an early and a late chunk. ``width`` is a multiple of twice the ranks."""
    size = width // (2 * ranks)
    late = 2 * ranks - 1 - rank
    return range(rank * size, (rank + 1) * size), range(late * size, (late + 1) * size)


def tiles_of(runs: Sequence[Run], rank: int, ranks: int, width: int) -> tuple[tuple[Tile, ...], ...]:
    """For each of the ranks, the tiles of this rank's queries with that one's keys."""
    chunks = [chunks_of(other, ranks, width) for other in range(ranks)]
    return tuple(tuple(_tiles(runs, chunks[rank], keys)) for keys in chunks)


def _tiles(runs: Sequence[Run], queries: tuple[range, range], keys: tuple[range, range]) -> Iterator[Tile]:
    for key_place, key_chunk in enumerate(keys):
        for start, stop, end in runs:
            first, last = max(start, key_chunk.start), min(stop, key_chunk.stop)
            if first >= last:
                continue
            seen = _within(first, last, key_place, key_chunk)
            for place, chunk in enumerate(queries):
                if chunk == key_chunk:
                    yield Tile(seen, seen, causal=True)
                below, until = max(last, chunk.start), min(end, chunk.stop)
                if below < until:
                    yield Tile(_within(below, until, place, chunk), seen, causal=False)


def _within(first: int, last: int, place: int, chunk: range) -> slice:
    """Columns of the row as those of a rank, whose chunk ``place`` they are in."""
    offset = place * len(chunk) - chunk.start
    return slice(first + offset, last + offset)
