"""Nodes of one domain become neighbours, as far as can be."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations

import pytest
from nemorl.resources.neighbours import neighbours_first


def whole(domains: Sequence[str], size: int) -> int:
    """Models over ``size`` neighbouring nodes each that lie within one domain."""
    begins = range(0, len(domains) - size + 1, size)
    return sum(len(set(domains[begin : begin + size])) == 1 for begin in begins)


def ordered(domains: Sequence[str]) -> list[str]:
    return [domains[place] for place in neighbours_first([{"CPU", f"segment_{name}"} for name in domains])]


def test_by_hand() -> None:
    # a has 5 = 4 + 1 nodes and b has 3 = 2 + 1.
    assert ordered("abababaa") == list("aaaabbab")


@pytest.mark.parametrize("domains", ["ababab", "abcabc", "aabbbba", "abbcccd", "abcdefg", "ababbab"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_no_other_order_keeps_more_models_within_a_domain(domains: str, size: int) -> None:
    assert whole(ordered(domains), size) == max(whole(order, size) for order in set(permutations(domains)))


def test_nodes_that_say_nothing_of_their_place_stay_in_order() -> None:
    assert neighbours_first([{"CPU", "GPU"}] * 7) == list(range(7))


def test_the_nearest_connection_decides_and_others_only_sort() -> None:
    nodes = [
        {"nvlink_domain_1-0", "segment_0", "switch_b"},
        {"nvlink_domain_2-0", "segment_0", "switch_a"},
        {"nvlink_domain_1-0", "segment_1", "switch_b"},
        {"nvlink_domain_2-0", "segment_1", "switch_a"},
    ]
    assert neighbours_first(nodes) == [1, 3, 0, 2]
