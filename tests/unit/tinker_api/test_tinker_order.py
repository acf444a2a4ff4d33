"""Requests of one model run by their numbers."""

from __future__ import annotations

from itertools import permutations

import pytest
from nemorl_agents.tinker.order import Order


def ran(order: Order) -> list[str]:
    found = []
    while (first := order.first()) is not None:
        found.append(first)
        order.advance()
    return found


@pytest.mark.parametrize("arrival", [*permutations([1, 2, 3, 4])], ids=str)
def test_any_arrival_runs_by_number(arrival: tuple[int, ...]) -> None:
    order, found = Order(1), []
    for seq in arrival:
        order.offer(seq, str(seq))
        found += ran(order)
    assert found == ["1", "2", "3", "4"]


def test_a_gap_holds_what_is_behind_it_and_is_named() -> None:
    order = Order(3)
    for seq in (4, 6):
        order.offer(seq, str(seq))
    assert (order.first(), order.missing) == (None, 3)
    order.offer(3, "3")
    assert (ran(order), order.missing) == (["3", "4"], 5)
    assert order.drain() == ["6"]
    assert (len(order), order.missing) == (0, None)


def test_a_request_that_has_run_does_not_run_again() -> None:
    order = Order(5)
    order.offer(4, "4")
    assert len(order) == 0
