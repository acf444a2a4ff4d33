"""Asynchronous runs on a real Ray whose trainer and generator are killed while the other one works."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from kills import KillAtRandom
from test_async_runs import APART, ASYNC, curve, train

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.usefixtures("private_ray")]


@pytest.mark.full
def test_kills_at_any_moment_cost_no_step(tiny_model: Path, tmp_path: Path) -> None:
    kills = int(os.environ.get("NEMORL_TEST_KILLS", "3"))
    killer = KillAtRandom(kills, every=2, seed=5, roles=("generator", "trainer"))
    steps = 3 * kills
    result = train(
        tiny_model,
        tmp_path / "run",
        killer,
        rollouts=ASYNC,
        max_steps=steps,
        checkpoint={"every": 1, "keep_last": 1},
        cluster={**APART, "max_restarts": 2 * kills},
    )
    assert len(killer.done) == kills
    assert set(killer.done) == set(killer.roles)
    assert [record["step"] for record in result.history if "train/loss" in record] == list(range(1, steps + 1))
    assert max(curve(result, "train/max_trajectory_age")) <= 1
    events = [json.loads(line) for line in (result.run_dir / "events.jsonl").read_text().splitlines()]
    lost = [event for event in events if "died during" in event.get("message", "")]
    assert len(lost) >= kills - 1  # one that dies as the run ends is missed by nobody
