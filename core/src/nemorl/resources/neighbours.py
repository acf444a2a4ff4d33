"""Which nodes of a cluster lie together, from the resources by which they say where they are."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence

NEAREST_FIRST = ("nvlink_domain_", "segment_", "switch_")
"""How names of such resources begin (``nemorl launch`` gives them to Ray)."""


def neighbours_first(nodes: Sequence[Collection[str]]) -> list[int]:
    """An order of nodes in which as many neighbours as possible share a domain.

    A model that is spread over nodes takes them in order: the first two, the next two. Each domain is cut into blocks
    of powers of two, and larger blocks come first. So for models over 1, 2, 4, … nodes no order keeps more of them
    within one domain: from 5 and 3 nodes come blocks of 4, 2, 1 and 1, hence one model of four nodes, or three of two.

    Args:
        nodes: Of each node, the names of its resources. Its domain is its NVLink domain, else its segment, else its
            switches, else it has none.

    Returns:
        Positions in ``nodes``.

    >>> neighbours_first([{"segment_0"}, {"segment_1"}, {"segment_0"}, {"segment_1"}])
    [0, 2, 1, 3]
    """
    domains: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for position, resources in enumerate(nodes):
        domains[_domain(resources)].append(position)
    blocks: list[list[int]] = []
    for members in domains.values():
        members.sort(key=lambda position: (_places(nodes[position]), position))
        begin = 0
        for size in _powers_of_two(len(members)):
            blocks.append(members[begin : begin + size])
            begin += size
    blocks.sort(key=lambda block: (-len(block), _places(nodes[block[0]]), block[0]))
    return [position for block in blocks for position in block]


def _domain(resources: Collection[str]) -> tuple[str, ...]:
    for beginning in NEAREST_FIRST:
        if found := tuple(sorted(name for name in resources if name.startswith(beginning))):
            return found
    return ()


def _places(resources: Collection[str]) -> list[str]:
    """From the far to the near, so that what sorts together also lies together."""
    return [name for beginning in reversed(NEAREST_FIRST) for name in sorted(resources) if name.startswith(beginning)]


def _powers_of_two(count: int) -> list[int]:
    """The largest first; their sum is ``count``."""
    return [1 << bit for bit in reversed(range(count.bit_length())) if count >> bit & 1]
