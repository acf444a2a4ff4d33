"""The contract of commands, and what this one promises besides."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from nemorl.errors import UsageError
from nemorl_testing import conformance
from typer.testing import CliRunner

from nemorl_example.command import app, summary

test_conformance = conformance("commands", "example")


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    records = [{"step": step, "train/reward": reward} for step, reward in enumerate([0.25, 0.75, 0.5], 1)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return tmp_path


def test_the_answer_has_first_last_and_highest(run_dir: Path) -> None:
    done = CliRunner().invoke(app, [str(run_dir), "--json"])
    assert json.loads(done.stdout) == {"first": 0.25, "last": 0.5, "highest": 0.75}


def test_a_misspelt_metric_is_guessed(run_dir: Path) -> None:
    with pytest.raises(UsageError, match="Did you mean 'train/reward'"):
        summary(run_dir / "metrics.jsonl", "train/rewards")
