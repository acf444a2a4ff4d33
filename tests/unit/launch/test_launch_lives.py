"""A job that is started again and again without getting on ends, with the reason."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from nemorl.errors import ResourceError
from nemorl_ops.launch import entry
from nemorl_ops.launch.lives import ALL, FAILED, Lives
from recorded_messages import Raises


def reached(run_dir: Path, step: int) -> None:
    run_dir.mkdir(parents=True, exist_ok=True)
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": step, "train/loss": 1.0}) + "\n")


def test_two_lives_that_end_where_they_began_are_enough(tmp_path: Path, raises: Raises) -> None:
    run_dir, lives = tmp_path / "runs/a", Lives(tmp_path / "runs/a", "4711")
    lives.begin()
    reached(run_dir, 53)  # and dies
    for _ in range(FAILED):
        lives.begin()  # continues at its checkpoint, and dies at step 53 again
    with raises(ResourceError, 2, 53):
        lives.begin()
    Lives(run_dir, "4712").begin()  # somebody looked into it and submitted it again


def test_a_life_that_gets_on_forgives_those_before(tmp_path: Path) -> None:
    run_dir, lives = tmp_path / "a", Lives(tmp_path / "a", "1")
    for step in range(1, 30):
        lives.begin()
        if step % 2:
            reached(run_dir, step)
    (run_dir / "checkpoints" / "step_000100").mkdir(parents=True)  # a save is progress, also where metrics are lost
    lives.begin()


def test_preemption_is_nobodys_fault_for_a_while(tmp_path: Path, raises: Raises) -> None:
    lives = Lives(tmp_path / "a", "1")
    for _ in range(ALL):
        lives.begin()
        lives.asked()
    with raises(ResourceError, ALL, 0):
        lives.begin()


def test_a_pod_whose_run_fails_at_the_same_step_ends_the_job(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = ["--run-dir", str(tmp_path / "a"), "--launch", "1", "--"]
    failing = [
        sys.executable,
        "-c",
        f"print('step'); open({str(tmp_path / 'ran')!r}, 'a').write('x'); raise SystemExit(3)",
    ]
    assert [entry.main([*job, *failing]) for _ in range(FAILED)] == [3, 3]
    stopped: list[int] = []
    monkeypatch.setattr(entry, "end_job", lambda: stopped.append(1) or 1)
    assert entry.main([*job, *failing]) == 1
    assert stopped, "KubeRay gives a job that has failed another cluster"
    assert (tmp_path / "ran").read_text() == "xx", "it was not run a third time"
    assert "without another step" in capfd.readouterr().err
