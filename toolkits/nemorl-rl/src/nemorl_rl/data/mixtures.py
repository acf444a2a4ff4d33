"""Rows of several sources as one table, and the order in which a run takes them.

``Joined`` has every row once, ``Mixture`` takes its parts in given proportions, ``RowSets`` keeps them apart by name
for validation. An order says which row stands at a position, so that a run's place in its data is one integer.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate
from typing import Any, Protocol

from nemorl.errors import UsageError
from nemorl.types import Row

from nemorl_rl.data.fingerprints import joined
from nemorl_rl.rollouts.seeding import derive_seed

LONGEST_PERIOD = 100_000
"""Rows after which proportions repeat, at most: a list of this length is kept."""


class Order(Protocol):
    """Which row stands at a position; positions go on without end."""

    def row_at(self, position: int) -> int:
        """Number of the row."""


class ShuffledOrder:
    """Every row once per epoch, each epoch in another order that depends on seed and epoch alone.

    Example:
        >>> order = ShuffledOrder(3, seed=1, shuffle=True)
        >>> sorted(order.row_at(position) for position in range(3, 6))
        [0, 1, 2]
    """

    def __init__(self, count: int, *, seed: int, shuffle: bool) -> None:
        self._count, self._seed, self._shuffle = count, seed, shuffle
        self._of_epoch = lru_cache(maxsize=2)(self._epoch)

    def row_at(self, position: int) -> int:
        epoch, offset = divmod(position, self._count)
        return self._of_epoch(epoch)[offset] if self._shuffle else offset

    def _epoch(self, epoch: int) -> list[int]:
        order = list(range(self._count))
        random.Random(derive_seed(self._seed, "epoch", epoch)).shuffle(order)
        return order


class Joined(Sequence[Row]):
    """Several tables as one, each after the one before.

    Example:
        >>> Joined([[{"prompt": "a"}], [{"prompt": "b"}, {"prompt": "c"}]])[2]
        {'prompt': 'c'}
    """

    def __init__(self, tables: Sequence[Sequence[Mapping[str, Any]]]) -> None:
        self._tables = tables
        self._ends = list(accumulate(len(table) for table in tables))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        number = index if index >= 0 else index + len(self)
        for table, end in zip(self._tables, self._ends, strict=True):
            if number < end:
                return table[number - end]
        raise IndexError(index)

    def fingerprint(self) -> str:
        """Of the tables, in their order."""
        return joined(self._tables)


class RowSets(Joined):
    """Several tables that keep their names: one after the other as rows, each alone in ``sets``.

    Example:
        >>> RowSets({"a": [{"prompt": "x"}], "b": [{"prompt": "y"}]}).sets["b"]
        [{'prompt': 'y'}]
    """

    def __init__(self, sets: Mapping[str, Sequence[Row]]) -> None:
        super().__init__(list(sets.values()))
        self.sets = sets


class Mixture(Joined):
    """Several tables, of which a run takes rows in given proportions. A table that ends begins anew, reshuffled.

    The proportions are exact in every period of ``sum(shares)`` rows, and as even within one as whole rows can be.
    An epoch has as many rows as the tables together.

    Example:
        >>> rows = Mixture([[{"prompt": "a"}], [{"prompt": "b"}] * 9], [2, 1])
        >>> order = rows.order(seed=0, shuffle=False)
        >>> "".join(rows[order.row_at(position)]["prompt"] for position in range(6))
        'abaaba'
    """

    def __init__(
        self,
        tables: Sequence[Sequence[Mapping[str, Any]]],
        weights: Sequence[float],
        *,
        seed: int = 0,
        rows_per_step: int | None = None,
    ) -> None:
        """
        Args:
            tables: The parts, none of them empty.
            weights: One positive number per part; only their proportions matter.
            seed: Another one gives other orders within the parts.
            rows_per_step: The batch size for which the weights were meant, if there is one.
        """
        super().__init__(tables)
        self.shares = shares(weights)
        """The weights as the smallest whole numbers of these proportions."""
        self.rows_per_step = rows_per_step
        self._seed = seed

    @property
    def sizes(self) -> list[int]:
        """Rows of each part."""
        return [len(table) for table in self._tables]

    def order(self, *, seed: int, shuffle: bool) -> Order:
        """The order of a run with this seed."""
        return MixedOrder(self.sizes, self.shares, seed=derive_seed(seed, "mixture", self._seed), shuffle=shuffle)


class MixedOrder:
    """Positions go to the parts by a fixed pattern; each part has an order of its own."""

    def __init__(self, sizes: Sequence[int], shares: Sequence[int], *, seed: int, shuffle: bool) -> None:
        self._shares = shares
        self._starts = [0, *accumulate(sizes)]
        self._parts = [
            ShuffledOrder(size, seed=derive_seed(seed, "part", number), shuffle=shuffle)
            for number, size in enumerate(sizes)
        ]
        self._pattern, taken = [], [0] * len(sizes)
        for part in even_pattern(shares):
            self._pattern.append((part, taken[part]))
            taken[part] += 1

    def row_at(self, position: int) -> int:
        period, offset = divmod(position, len(self._pattern))
        part, earlier = self._pattern[offset]
        return self._starts[part] + self._parts[part].row_at(period * self._shares[part] + earlier)


def shares(weights: Sequence[float]) -> list[int]:
    """The smallest whole numbers in the proportions of the weights as they are written.

    Raises:
        UsageError: they need a period of more than ``LONGEST_PERIOD`` rows.

    Example:
        >>> shares([0.5, 0.3, 0.2])
        [5, 3, 2]
    """
    fractions = [Fraction(str(weight)) for weight in weights]
    unit = math.lcm(*(fraction.denominator for fraction in fractions))
    whole = [int(fraction * unit) for fraction in fractions]
    divisor = math.gcd(*whole)
    found = [number // divisor for number in whole]
    if sum(found) > LONGEST_PERIOD:
        raise UsageError(
            f"weights {', '.join(map(str, weights))} repeat after {sum(found):,} rows only",
            fix=f"round the weights, so that it is {LONGEST_PERIOD:,} at most",
        )
    return found


def even_pattern(shares: Sequence[int]) -> list[int]:
    """One period of parts: each position goes to the part that is furthest behind its share, the first of equals.

    Example:
        >>> even_pattern([3, 1])
        [0, 0, 1, 0]
    """
    total, taken, pattern = sum(shares), [0] * len(shares), []
    for position in range(1, total + 1):
        behind = [share * position - total * done for share, done in zip(shares, taken, strict=True)]
        part = behind.index(max(behind))
        taken[part] += 1
        pattern.append(part)
    return pattern
