"""The choice of who answers a request: the least loaded, but one that has computed its beginning if it can.

``Affinity`` remembers who knows what and chooses among those that are there, which may come and go. ``Router`` counts
besides.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Generic, TypeVar

Place = TypeVar("Place", bound=Hashable)

BLOCK_TOKENS = 64
"""Prompts are told apart at multiples of this; engines cache blocks of 16 to 128 tokens."""
SLACK = 16
"""Requests that a place may have more than the least loaded one and still be preferred for what it knows: a group of
samples stays together, a prompt that all share (a system prompt) does not put all work in one place."""
REMEMBERED = 65_536
"""Beginnings whose place is known."""


class Affinity(Generic[Place]):
    """Remembers which place has computed which beginning.

    Example:
        >>> affinity = Affinity[str]()
        >>> affinity.remember(["a"], "one")
        >>> affinity.choose(["a"], {"two": 0, "one": 3}), affinity.choose(["b"], {"two": 0, "one": 3})
        ('one', 'two')
    """

    def __init__(self) -> None:
        self._known: OrderedDict[Hashable, Place] = OrderedDict()
        """Where the last request with a beginning went, the latest at the end."""

    def choose(self, beginnings: Sequence[Hashable], loads: Mapping[Place, int]) -> Place:
        """One of the places.

        Args:
            beginnings: Of the request, what counts most first.
            loads: Requests in progress at each, in the order in which ties are broken.
        """
        least = min(loads, key=loads.__getitem__)
        for beginning in beginnings:
            known = self._known.get(beginning)
            if known is not None and known in loads and loads[known] < loads[least] + SLACK:
                return known
        return least

    def remember(self, beginnings: Sequence[Hashable], place: Place) -> None:
        """A place computes these now."""
        for beginning in beginnings:
            self._known[beginning] = place
            self._known.move_to_end(beginning)
        while len(self._known) > REMEMBERED:
            self._known.popitem(last=False)

    def forget(self, place: Place) -> None:
        """A place has lost what it had computed."""
        for beginning in [beginning for beginning, known in self._known.items() if known == place]:
            del self._known[beginning]


class Router:
    """Counts the requests of replicas and chooses among them.

    Example:
        >>> router = Router(lambda: range(2), limit=2)
        >>> [router.choose(["a"]), router.choose(["b"]), router.choose(["a"]), router.choose(["c"])]
        [0, 1, 0, 1]
        >>> router.choose(["a"]) is None  # both are full
        True
        >>> router.release(1)
        >>> router.choose(["a"])
        1
    """

    def __init__(self, replicas: Callable[[], Sequence[int]], limit: int) -> None:
        """
        Args:
            replicas: Numbers of those that are there now.
            limit: Most requests of one.
        """
        self._replicas, self._limit = replicas, limit
        self._counts: dict[int, int] = {}
        """Requests of each replica that ever had one."""
        self._affinity = Affinity[int]()

    @property
    def loads(self) -> dict[int, int]:
        """Requests of each replica that is there."""
        return {rank: self._counts.get(rank, 0) for rank in self._replicas()}

    def choose(self, beginnings: Sequence[Hashable]) -> int | None:
        """The replica for a request, which it has from now on; ``None`` if all are full."""
        free = {rank: load for rank, load in self.loads.items() if load < self._limit}
        if not free:
            return None
        rank = self._affinity.choose(beginnings, free)
        self._counts[rank] = free[rank] + 1
        self._affinity.remember(beginnings, rank)
        return rank

    def release(self, rank: int) -> None:
        """A request of this replica has ended."""
        self._counts[rank] -= 1


def beginnings_of(token_ids: Sequence[int]) -> Sequence[Hashable]:
    """Beginnings that a prompt may share with others: itself and its whole blocks, the longest first.

    >>> short, long = beginnings_of(range(64)), beginnings_of(range(100))
    >>> len(short), len(long), long[1] == short[0]
    (1, 2, True)
    """
    found: list[Hashable] = []
    key = 0
    for start in range(0, len(token_ids), BLOCK_TOKENS):
        key = hash((key, tuple(token_ids[start : start + BLOCK_TOKENS])))
        found.append(key)
    return found[::-1]
