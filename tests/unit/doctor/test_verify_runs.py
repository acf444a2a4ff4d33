"""``nemorl runs verify`` finds each damaged part of a run, and says nothing of sound ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from nemorl.config.run import CheckpointConfig
from nemorl.storage.checkpoints import CheckpointManager
from nemorl_insight.doctor.runs import app
from typer.testing import CliRunner


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "runs" / "grpo-1"
    manager = CheckpointManager(folder / "checkpoints", CheckpointConfig(keep_last=5), metric="reward")
    for step in (1, 2):
        manager.begin(step, {"policy": lambda path: (path / "weights").write_text("x") and None}, {"step": step}, {})
        manager.publish(wait=True)
    (folder / "config.yaml").write_text("algorithm: grpo\n")
    (folder / "environment.json").write_text("{}")
    (folder / "plugins.lock.json").write_text('{"plugins": []}')
    (folder / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"st')  # being written
    (folder / "events.jsonl").write_text("")
    return folder


def verify(*arguments: object) -> tuple[int, Any]:
    done = CliRunner().invoke(app, [*map(str, arguments), "--json"])
    return done.exit_code, json.loads(done.stdout)


PARTS = ["config.yaml", "environment.json", "plugins.lock.json", "metrics.jsonl", "events.jsonl"]
PARTS += ["checkpoints/step_000001", "checkpoints/step_000002"]


@pytest.mark.parametrize("of", ["the run", "the folder of runs"])
def test_a_sound_run_is_whole(run: Path, of: str) -> None:
    code, verdicts = verify(run if of == "the run" else run.parent)
    assert code == 0
    facts = [{"run": "grpo-1", "part": part, "problem": None, "newest_whole": part == PARTS[-1]} for part in PARTS]
    assert verdicts == facts


def test_the_newest_whole_checkpoint_is_named(run: Path) -> None:
    (run / "checkpoints/step_000002/policy/weights").write_text("y")
    _, verdicts = verify(run)
    assert [verdict["part"] for verdict in verdicts if verdict["newest_whole"]] == ["checkpoints/step_000001"]


DAMAGES: dict[str, tuple[str, Callable[[Path], Any], str]] = {
    "config gone": ("config.yaml", Path.unlink, "cannot be read"),
    "config of a list": ("config.yaml", lambda path: path.write_text("[1]"), "it is not a mapping"),
    "environment cut": ("environment.json", lambda path: path.write_text("{"), "cannot be read"),
    "lock of a list": ("plugins.lock.json", lambda path: path.write_text("[]"), "cannot be read"),
    "a line that is none": (
        "metrics.jsonl",
        lambda path: path.write_text('{"a": 1}\n[3]\n'),
        "line 2 is not an object",
    ),
    "not UTF-8": ("events.jsonl", lambda path: path.write_bytes(b'{"a": "\xff"}\n'), "cannot be read"),
    "weights": ("checkpoints/step_000001", lambda path: (path / "policy/weights").write_text("y"), "checksum"),
    "manifest": ("checkpoints/step_000002", lambda path: (path / "manifest.json").write_text("[]"), "a list"),
    "state": ("checkpoints/step_000002", lambda path: (path / "trainer.json").unlink(), "lacks trainer.json"),
}


@pytest.mark.parametrize(("part", "damage", "words"), DAMAGES.values(), ids=DAMAGES)
def test_damage_is_named_where_it_is(run: Path, part: str, damage: Callable[[Path], Any], words: str) -> None:
    damage(run / part)
    code, verdicts = verify(run)
    assert code == 1
    assert [verdict["part"] for verdict in verdicts] == PARTS
    (wrong,) = [verdict for verdict in verdicts if verdict["problem"] is not None]
    assert wrong["part"] == part
    assert words in wrong["problem"]


def test_a_person_sees_a_table(run: Path) -> None:
    (run / "checkpoints/step_000001/manifest.json").write_text("[bold]no markup[/bold]")
    done = CliRunner().invoke(app, [str(run)], terminal_width=200)
    assert done.exit_code == 1
    assert "checkpoints/step_000002" in done.stdout
    assert "no readable manifest" in " ".join(done.stdout.split())


def test_a_folder_without_runs_is_told(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, [str(tmp_path)])
    assert "no run in" in str(done.exception)
