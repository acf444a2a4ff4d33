"""Which server gets a request: the one that has computed most of its prompt, unless it is busier than others."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence

BLOCK_TOKENS = 64
"""Prefixes are told apart at multiples of this; engines cache blocks of 16 to 128 tokens."""
REMEMBERED = 65_536
"""Prefixes, over all servers."""
SLACK = 16
"""Requests by which a server may be busier than the least busy one and still get those whose prefix it has: a group of
samples stays together, a prompt that all share (a system prompt) does not put all work on one server."""


class PrefixAffinity:
    """Remembers which server computed which prefix."""

    def __init__(self) -> None:
        self._owners: OrderedDict[int, str] = OrderedDict()

    def choose(self, token_ids: Sequence[int], loads: Mapping[str, int]) -> str:
        """One of the servers.

        Args:
            token_ids: The prompt.
            loads: Requests in progress at each, in the order in which ties are broken.
        """
        least = min(loads, key=lambda url: loads[url])
        for key in _keys(token_ids):
            owner = self._owners.get(key)
            if owner is not None and owner in loads and loads[owner] <= loads[least] + SLACK:
                return owner
        return least

    def remember(self, token_ids: Sequence[int], url: str) -> None:
        """A server computes this prefix now."""
        for key in _keys(token_ids):
            self._owners[key] = url
            self._owners.move_to_end(key)
        while len(self._owners) > REMEMBERED:
            self._owners.popitem(last=False)

    def forget(self, url: str) -> None:
        """A server has lost what it had computed."""
        for key in [key for key, owner in self._owners.items() if owner == url]:
            del self._owners[key]


def _keys(token_ids: Sequence[int]) -> Iterator[int]:
    """One key for the whole prefix and for its whole blocks, longest first."""
    found, key = [], 0
    for start in range(0, len(token_ids), BLOCK_TOKENS):
        key = hash((key, tuple(token_ids[start : start + BLOCK_TOKENS])))
        found.append(key)
    return reversed(found)
