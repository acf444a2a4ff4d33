"""The recipe of ``nemorl quickstart --vision``: what is imitated, what is asked, and what its end says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from nemorl.config.load import load_config
from nemorl.errors import ConfigError
from nemorl_rl.data.rows import rows_of
from nemorl_tasks.quickstart import command, vision


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return vision.write_model(tmp_path_factory.mktemp("base"))


def test_the_teacher_is_right_about_each_drawing_once_and_one_too_high_once() -> None:
    rows = rows_of({**vision.drawings(0), "num_train": 3}, "train") or []
    taught = vision.sloppy_rows(rows)
    errors = [int(row["response"]) - int(row["answer"]) for row in taught]
    assert errors == [0, 1, 0, 1, 0, 1]
    assert [row["prompt"] for row in taught[::2]] == [row["prompt"] for row in rows]


def test_both_stages_train_the_tower_and_fit_their_epochs(model: Path, tmp_path: Path) -> None:
    warm_up: Any = load_config(vision.sft_config(model, tmp_path / "sft", 0))
    reinforced: Any = load_config(vision.grpo_config(model, tmp_path / "grpo", 0))
    for config in (warm_up, reinforced):
        assert set(config.policy.media.train) == {"connector", "tower"}
    rows = len(vision.taught_rows(0))
    assert rows == 2 * 1024
    assert warm_up.max_epochs * rows // warm_up.batch_size >= warm_up.max_steps  # 5 * 64 >= 300
    assert reinforced.max_epochs * 1024 // reinforced.num_prompts_per_step >= reinforced.max_steps  # 3 * 64 >= 150


def test_the_control_asks_the_same_and_shows_nothing(model: Path, tmp_path: Path) -> None:
    config: Any = load_config(vision.grpo_config(model, tmp_path / "grpo", 0))
    sets = {name: rows_of(data, "validation") or [] for name, data in config.validation.data.sets.items()}
    drawn, blank = sets["drawings"], sets["blank"]
    assert [row["answer"] for row in drawn] == [row["answer"] for row in blank]
    assert len({str(row["prompt"]) for row in drawn}) > 200  # of 256; few differ where one shape is drawn
    assert len({str(row["prompt"]) for row in blank}) == 1
    assert tuple(f"validation/{name}/accuracy" for name in sets) == (vision.ACCURACY, vision.CONTROL)


def test_learning_from_blank_images_leaves_the_held_out_drawings_as_they_are(model: Path, tmp_path: Path) -> None:
    config: Any = load_config(vision.grpo_config(model, tmp_path / "grpo", 0), ["data.blank=true"])
    assert config.data.blank
    assert not config.validation.data.sets["drawings"].blank


def test_a_mistake_in_an_override_is_said_before_anything_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raises: Any
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with raises(ConfigError, "policy.optimizer.lr", "-1"):
        command.quickstart(["policy.optimizer.lr=-1"], with_vision=True, run_dir=tmp_path / "first")
    assert not (tmp_path / "first" / "sft").exists()


def test_the_end_shows_the_control_beside_the_drawings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    summary = {"accuracy_before": 0.53, "accuracy_after": 0.98, "control_before": 0.25, "control_after": 0.23}
    command._tell_sight({**summary, "seed": 0, "seconds": 61.6, "report": "r.html"}, tmp_path / "first")
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    for expected in (["before", "GRPO", "53%", "25%"], ["after", "GRPO", "98%", "23%"]):
        assert expected in lines
    assert ["without", "looking", "25%", "25%"] in lines
