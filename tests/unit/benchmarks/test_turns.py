"""The turnstile of the benchmarks: whose step runs when, and what happens when one side fails."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture
def turns_class(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield __import__("_turns").Turns
    sys.modules.pop("_turns", None)


def test_sides_alternate_and_never_overlap(turns_class):
    turns, order = turns_class("a", "b"), []

    def side(name):
        for step in range(3):
            order.append(f"{name}{step}")
            turns.step_done(name, tokens=step)

    turns.run(a=lambda: side("a"), b=lambda: side("b"))
    assert order == ["a0", "b0", "a1", "b1", "a2", "b2"]
    assert [step.facts["tokens"] for step in turns.steps["b"]] == [0, 1, 2]


def test_a_side_that_ends_early_leaves_the_rest_to_the_other(turns_class):
    turns = turns_class("a", "b")
    turns.run(a=lambda: turns.step_done("a"), b=lambda: [turns.step_done("b") for _ in range(4)])
    assert (len(turns.steps["a"]), len(turns.steps["b"])) == (1, 4)


def test_waiting_for_the_other_side_is_not_part_of_a_step(turns_class):
    turns = turns_class("a", "b")

    def side(name, seconds):
        for _ in range(2):
            time.sleep(seconds)
            turns.step_done(name)

    turns.run(a=lambda: side("a", 0.0), b=lambda: side("b", 0.2))
    assert all(step.wall_s < 0.1 for step in turns.steps["a"])
    assert all(step.wall_s >= 0.2 for step in turns.steps["b"])


def test_a_failing_side_ends_the_run_and_is_the_cause(turns_class):
    turns = turns_class("a", "b")

    def broken():
        raise ValueError("no model")

    with pytest.raises(RuntimeError, match="benchmarked side") as error:
        turns.run(a=lambda: [turns.step_done("a") for _ in range(9)], b=broken)
    assert isinstance(error.value.__cause__, ValueError)
