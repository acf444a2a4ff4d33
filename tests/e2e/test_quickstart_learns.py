"""``nemorl quickstart --vision`` learns to count what it sees: a minute of one core."""

from __future__ import annotations

from pathlib import Path

import pytest
from nemorl.base.files.jsonl import read_jsonl
from nemorl_cli.console import Console
from nemorl_tasks.quickstart import vision
from nemorl_tasks.quickstart.command import run

pytestmark = [pytest.mark.slow, pytest.mark.full]


def test_a_model_learns_to_count_and_cannot_count_on_blank_images(tmp_path: Path) -> None:
    summary = run(tmp_path / "run", 0, Console(quiet=True), chosen=vision)
    assert 0.35 < summary["accuracy_before"] < 0.65  # the teacher is right every second time
    assert summary["accuracy_after"] > 0.9
    # 256 questions of four answers: 0.25 +- 0.027; of 256 drawings the commonest count has a share below 0.35.
    assert 0.15 < summary["control_after"] < 0.35
    assert (tmp_path / "run" / "report.html").is_file()


def test_a_model_that_learns_from_blank_images_stays_at_chance(tmp_path: Path) -> None:
    run(tmp_path / "run", 0, Console(quiet=True), ["data.blank=true", "max_steps=60"], vision)
    records = read_jsonl(tmp_path / "run" / "grpo" / "metrics.jsonl")
    rewards = [record["train/reward"] for record in records if "train/reward" in record]
    assert len(rewards) == 60
    last = rewards[-20:]  # 320 questions: 0.25 +- 0.024
    assert 0.15 < sum(last) / len(last) < 0.35
