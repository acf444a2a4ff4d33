"""Choosing distinct problems out of a numbered space, for two splits that cannot overlap.

A generated dataset numbers its problems ``0 … size - 1`` and knows how to write down number ``i``. Only the chosen
numbers are kept in memory; rows are written when they are read. The choice depends on the seed alone: no ``hash()``,
which differs between processes.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from nemorl.types import Row


def choose(size: int, num_train: int, num_validation: int, seed: str) -> tuple[list[int], list[int]]:
    """Distinct (train, validation) numbers below ``size``, in random order.

    The validation problems do not depend on ``num_train``, so runs with more or less data stay comparable.
    """
    assert num_train + num_validation <= size, "the config checks this"
    validation = random.Random(f"{seed}/validation").sample(range(size), num_validation)
    # Draw among the others by rank, then step over the held-out numbers: [1, 4] held out maps 0 1 2 3 to 0 2 3 5.
    gaps = [number - rank for rank, number in enumerate(sorted(validation))]
    drawn = random.Random(f"{seed}/train").sample(range(size - num_validation), num_train)
    return [rank + bisect_right(gaps, rank) for rank in drawn], validation


def share(total: int, capacities: Sequence[int]) -> list[int]:
    """``total`` split as evenly as the capacities allow: ``share(10, [2, 9, 9])`` is ``[2, 4, 4]``."""
    shares = [0] * len(capacities)
    for rank, index in enumerate(sorted(range(len(capacities)), key=lambda i: capacities[i])):
        shares[index] = min(capacities[index], total // (len(capacities) - rank))
        total -= shares[index]
    return shares


class GeneratedRows(Sequence[Row]):
    """Rows written on access by ``write(problem)``: picklable, a few bytes each."""

    def __init__(self, problems: Sequence[Any], write: Callable[[Any], Row] | partial[Row]) -> None:
        self._problems = problems
        self._write = write

    def __len__(self) -> int:
        return len(self._problems)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return GeneratedRows(self._problems[index], self._write)
        return self._write(self._problems[index])
