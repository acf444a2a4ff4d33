"""Timer: seconds per phase, on a clock that the test moves."""

from __future__ import annotations

import pytest
from nemorl.base.process.timing import Timer


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_phase_entered_twice_adds_up() -> None:
    clock = Clock()
    timer = Timer(clock=clock)
    for seconds in (1.0, 2.5):
        with timer.phase("generation"):
            clock.now += seconds
    assert timer.drain() == {"generation": 3.5}


def test_drain_starts_from_zero() -> None:
    timer = Timer(clock=Clock())
    with timer.phase("generation"):
        pass
    timer.drain()
    assert timer.drain() == {}


def test_an_outer_phase_counts_its_inner_ones() -> None:
    clock = Clock()
    timer = Timer(clock=clock)
    with timer.phase("total_step_time"):
        clock.now += 1
        with timer.phase("generation"):
            clock.now += 2
    assert timer.drain() == {"generation": 2.0, "total_step_time": 3.0}


def test_a_phase_that_raises_is_counted() -> None:
    clock = Clock()
    timer = Timer(clock=clock)

    def generate() -> None:
        with timer.phase("generation"):
            clock.now += 2
            raise ValueError("boom")

    with pytest.raises(ValueError, match="boom"):
        generate()
    assert timer.drain() == {"generation": 2.0}


def test_on_enter_names_the_phase_that_runs_now() -> None:
    seen: list[str] = []
    timer = Timer(seen.append)
    with timer.phase("rollout"), timer.phase("generation"):
        pass
    assert seen == ["rollout", "generation", "rollout"]
