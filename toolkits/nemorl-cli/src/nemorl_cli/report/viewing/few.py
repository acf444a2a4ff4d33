"""A few of many, spread over all of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

Item = TypeVar("Item")


def spread(items: Sequence[Item]) -> Iterator[Item]:
    """The first, the last, the middle, the middles of the halves, and so on.

    Example:
        >>> list(spread([1, 2, 3, 4, 5]))
        [1, 5, 3, 2, 4]
    """
    if items:
        yield items[0]
    if len(items) > 1:
        yield items[-1]
    ranges = [(0, len(items) - 1)]
    while ranges:
        low, high = ranges.pop(0)
        if high - low > 1:
            middle = (low + high) // 2
            yield items[middle]
            ranges += [(low, middle), (middle, high)]
