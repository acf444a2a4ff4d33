"""How often lost workers are replaced."""

from __future__ import annotations

from pathlib import Path

import pytest
from nemorl.config import ClusterConfig
from nemorl.config.load import validate
from nemorl.errors import ConfigError, WorkerLostError
from nemorl.resources.manager import ResourceManager
from nemorl_grpo.config import GRPOConfig


def restarts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, losses_s: list[float], *, steps: int = 1, **cluster: float
) -> list[str]:
    """What is said at each loss, the moments of which are given in seconds; between two of them are so many steps."""
    config = GRPOConfig(model="none", cluster=ClusterConfig(**cluster))
    said: list[str] = []
    manager = ResourceManager(config, tmp_path, on_restart=said.append)
    for moment in losses_s:
        monkeypatch.setattr("time.monotonic", lambda now=moment: now)
        manager.count_restart(WorkerLostError("lost"))
        manager.reached += steps
    return said


def test_a_run_gives_up_when_workers_are_lost_too_often(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(WorkerLostError):
        restarts(tmp_path, monkeypatch, [0.0, 10.0, 59.0], max_restarts=2, restart_window_s=60.0)


def test_rare_losses_never_end_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The loss at 0 is forgotten at 60, that at 10 at 70.
    said = restarts(tmp_path, monkeypatch, [0.0, 10.0, 60.0, 70.0, 500.0], max_restarts=2, restart_window_s=60.0)
    assert [line.split("(")[1] for line in said] == [
        "restart 1 of 2)", "restart 2 of 2)", "restart 2 of 2)", "restart 2 of 2)", "restart 1 of 2)",
    ]  # fmt: skip


def test_a_worker_that_is_lost_in_the_same_step_each_time_ends_the_run_however_long_that_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(WorkerLostError):
        restarts(tmp_path, monkeypatch, [0.0, 1800.0, 3600.0, 5400.0], steps=0, max_restarts=3, restart_window_s=3600.0)


@pytest.mark.parametrize(
    ("cluster", "path"),
    [
        ({"env_vars": {"A": "1"}, "launcher": "local"}, "env_vars"),
        ({"runtime_env": {"env_vars": {"A": "1"}}, "launcher": "ray"}, "runtime_env"),
        ({"runtime_env": {"py_executable": "python"}, "launcher": "ray"}, "runtime_env"),
    ],
)
def test_what_cannot_reach_a_worker_is_refused(cluster: dict[str, object], path: str) -> None:
    with pytest.raises(ConfigError) as error:
        validate(ClusterConfig, cluster)
    assert [problem.path for problem in error.value.problems] == [path]
