"""A run is killed, its disk fills and its clock jumps, as seeds say: three here, hundreds by ``make chaos``."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from blows import LOCAL, ON_RAY, schedule
from random_blows import RandomBlows


def test_a_schedule_follows_from_its_seed_alone() -> None:
    assert schedule(7, LOCAL) == schedule(7, LOCAL)
    every = [blow for seed in range(200) for life in schedule(seed, ON_RAY) for blow in life]
    assert {blow.what for blow in every} == set(ON_RAY)
    assert {blow.step for blow in every} == {1, 2, 3}
    assert all((blow.amount != 0) == (blow.what == "clock jump") for blow in every)


@pytest.fixture(scope="module")
def runs() -> Iterator[RandomBlows]:
    with TemporaryDirectory(prefix="nemorl-chaos-") as folder, RandomBlows(Path(folder), "grpo") as runs:
        yield runs


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux" or shutil.which("cc") is None, reason="needs Linux and a C compiler")
@pytest.mark.parametrize(
    "seed", [0, 1, 5]
)  # a kill; a jump of the clock and a kill; a full disk where one can be mounted
def test_a_run_under_random_blows_ends_as_in_peace(runs: RandomBlows, seed: int) -> None:
    found = runs.play(seed)
    assert found["problems"] == []
    assert found["ends"][-1] == 0
