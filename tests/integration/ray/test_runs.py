"""Whole runs on a real Ray: the same numbers wherever the workers are, and the same end whoever dies on the way."""

from __future__ import annotations

import os
import re
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import small_runs
from kills import KillAtRandom
from nemorl.errors import WorkerLostError
from nemorl.run import TrainResult
from nemorl_rl.callbacks import Callback
from nemorl_rl.models.tiny import write_tiny_model
from recorded_messages import Raises
from small_runs import ALONE, weights

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.usefixtures("private_ray")]

SHARED: dict[str, Any] = {**ALONE, "launcher": "ray", "cpus_per_worker": 0.5}
APART: dict[str, Any] = {"workers_per_node": 2, "colocated": False, "cpus_per_worker": 0.5}


train = partial(small_runs.train, checkpoint={"every": 1})


def outcome(result: TrainResult) -> tuple[list[dict[str, float]], dict[str, bytes]]:
    """What must not depend on where a run ran: what was learnt from, and the weights byte by byte."""
    names = ("step", "train/reward", "train/loss", "train/grad_norm", "train/total_num_tokens")
    learnt = [{name: record[name] for name in names} for record in result.history if "train/loss" in record]
    return learnt, weights(result)


@pytest.fixture(scope="module")
def expected(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return outcome(train(tiny_model, tmp_path_factory.mktemp("local") / "run", ALONE))


@pytest.mark.parametrize("cluster", [SHARED, APART], ids=["colocated", "apart"])
def test_a_run_gives_the_same_numbers_on_ray(
    cluster: dict[str, Any], expected: Any, tiny_model: Path, tmp_path: Path
) -> None:
    result = train(tiny_model, tmp_path / "run", cluster)
    assert outcome(result) == expected
    logs = sorted(path.name for path in (tmp_path / "run" / "logs").iterdir())
    assert logs == ["generation-backend-HFGeneration-0.log", "training-backend-DTensor-0.log"]


class KillAt(Callback):
    """SIGKILL to the worker of a role, a moment after the given steps begin."""

    def __init__(self, **roles_by_step: str) -> None:
        self.roles = {int(step.removeprefix("step")): role for step, role in roles_by_step.items()}

    def on_step_begin(self, trainer: Any, step: int) -> None:
        role = self.roles.pop(step, None)
        if role is not None:
            workers = (trainer.run.policy if role == "trainer" else trainer.generation).workers
            os.kill(workers.facts[0].pid, signal.SIGKILL)


def test_killed_workers_change_nothing(expected: Any, tiny_model: Path, tmp_path: Path) -> None:
    result = train(tiny_model, tmp_path / "run", SHARED, KillAt(step2="generator", step3="trainer"))
    assert outcome(result) == expected
    events = (tmp_path / "run" / "events.jsonl").read_text()
    for role in ("generation backend HFGeneration", "training backend DTensor"):
        assert re.search(rf"{role} rank 0 [^\n]*died during", events), role


@pytest.mark.full
def test_a_trainer_killed_before_any_checkpoint_starts_over(expected: Any, tiny_model: Path, tmp_path: Path) -> None:
    result = train(tiny_model, tmp_path / "run", SHARED, KillAt(step2="trainer"), checkpoint={"every": 0})
    assert outcome(result) == expected


def test_a_run_gives_up_after_max_restarts_and_says_who_died(tiny_model: Path, tmp_path: Path, raises: Raises) -> None:
    cluster = {**SHARED, "max_restarts": 1}
    with raises(WorkerLostError, "DTensor", 0):
        train(tiny_model, tmp_path / "run", cluster, KillAt(step2="trainer", step3="trainer"))


ALGEBRA = [{"prompt": f"{a}+{b}=", "answer": answer} for a in "01x" for b in "01x" for answer in ("x", "2*x", "x^2")]
"""None of the answers is a number: only a grader process can say that ``1x`` is ``x``."""


@pytest.fixture(scope="module")
def speaks_algebra(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of so few tokens that two drawn at random are now and then right."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return write_tiny_model(tmp_path_factory.mktemp("algebra"), alphabet="012x+*=^", **sizes)


@pytest.mark.parametrize("asynchronous", [False, pytest.param(True, marks=pytest.mark.full)])
@pytest.mark.full
def test_random_kills_lose_and_repeat_nothing(asynchronous: bool, speaks_algebra: Path, tmp_path: Path) -> None:
    kills = int(os.environ.get("NEMORL_TEST_KILLS", "3"))
    changes: dict[str, Any] = {
        "max_steps": 3 * kills,
        "rows": ALGEBRA,
        "reward": None,
        "environment": {"name": "math", "timeout_s": 60},
        "generation": {"max_new_tokens": 2},
        "checkpoint": {"every": 1, "asynchronous": asynchronous},
    }
    quiet = train(speaks_algebra, tmp_path / "quiet", ALONE, **changes)
    killer = KillAtRandom(kills, every=2, seed=2)
    result = train(speaks_algebra, tmp_path / "run", {**SHARED, "max_restarts": 2 * kills}, killer, **changes)
    assert len(killer.done) == kills
    assert set(killer.done) == set(killer.roles)
    assert outcome(result) == outcome(quiet)
    rewards = [record["train/reward"] for record in result.history if "train/reward" in record]
    assert 0.0 < sum(rewards) < len(rewards), "nothing was right, or everything: kills of graders would not show"
    assert not any(record.get(f"train/grader_{what}") for record in result.history for what in ("crash", "timeout"))
