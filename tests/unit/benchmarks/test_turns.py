"""The turnstile of the benchmarks: whose step runs when, and what happens when one side fails."""

from __future__ import annotations

import itertools
import os
import signal
import time
from functools import partial

import pytest


@pytest.fixture
def take_turns(load_benchmark):
    return load_benchmark("_turns").take_turns


def work(turn, steps=3, seconds=0.0):
    for step in range(steps):
        start_s = time.monotonic()
        time.sleep(seconds)
        turn.step_done(number=step, start_s=start_s, end_s=time.monotonic())


def broken(turn):
    raise ValueError("no model")


def killed(turn):
    os.kill(os.getpid(), signal.SIGKILL)


def test_sides_alternate_and_never_overlap(take_turns):
    steps = take_turns({"a": partial(work, seconds=0.02), "b": partial(work, seconds=0.02)})
    in_order = [steps[side][number].facts for number in range(3) for side in "ab"]
    assert all(first["end_s"] <= second["start_s"] for first, second in itertools.pairwise(in_order))
    assert [step.facts["number"] for step in steps["b"]] == [0, 1, 2]


@pytest.mark.slow
def test_a_side_that_ends_early_leaves_the_rest_to_the_other(take_turns):
    steps = take_turns({"a": partial(work, steps=1), "b": partial(work, steps=4)})
    assert (len(steps["a"]), len(steps["b"])) == (1, 4)


def test_waiting_for_the_other_side_is_not_part_of_a_step(take_turns):
    steps = take_turns({"a": work, "b": partial(work, seconds=0.2)})
    assert all(step.wall_s < 0.1 for step in steps["a"])
    assert all(step.wall_s >= 0.2 for step in steps["b"])


@pytest.mark.parametrize(("side", "facts"), [(broken, ["ValueError"]), (killed, ["'b'"])])
def test_a_failing_side_ends_the_run_and_is_named(take_turns, side, facts, raises):
    with raises(RuntimeError, *facts):
        take_turns({"a": partial(work, steps=9), "b": side})
