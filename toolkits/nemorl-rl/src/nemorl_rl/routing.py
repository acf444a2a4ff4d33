"""Which replica of an engine answers a request: the least loaded, but one that knows its beginning if it can."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence

PREFIX_TOKENS = 64
"""Prompts that agree in these begin alike, for requests that name no conversation."""
SLACK = 8
"""Requests that a replica may have more than the least loaded one and still be preferred for what it knows."""
REMEMBERED = 4096
"""Beginnings whose replica is known."""


class Router:
    """Counts the requests of replicas and chooses among them.

    Example:
        >>> router = Router(replicas=2, limit=2)
        >>> [router.choose("a"), router.choose("b"), router.choose("a"), router.choose("c")]
        [0, 1, 0, 1]
        >>> router.choose("a") is None  # both are full
        True
        >>> router.release(1)
        >>> router.choose("a")
        1
    """

    def __init__(self, replicas: int, limit: int) -> None:
        """
        Args:
            replicas: How many there are.
            limit: Most requests of one.
        """
        self.loads = [0] * replicas
        """Requests of each replica."""
        self._limit = limit
        self._known: OrderedDict[Hashable, int] = OrderedDict()
        """Where the last request with a beginning went, the latest at the end."""

    def choose(self, beginning: Hashable) -> int | None:
        """The replica for a request, which it has from now on; ``None`` if all are full."""
        rank = min(range(len(self.loads)), key=self.loads.__getitem__)
        known = self._known.get(beginning)
        if known is not None and self.loads[known] < min(self._limit, self.loads[rank] + SLACK):
            rank = known
        if self.loads[rank] >= self._limit:
            return None
        self.loads[rank] += 1
        self._known[beginning] = rank
        self._known.move_to_end(beginning)
        if len(self._known) > REMEMBERED:
            self._known.popitem(last=False)
        return rank

    def release(self, rank: int) -> None:
        """A request of this replica has ended."""
        self.loads[rank] -= 1


def beginning_of(token_ids: Sequence[int]) -> Hashable:
    """What requests with a common beginning have in common."""
    return tuple(token_ids[:PREFIX_TOKENS])
