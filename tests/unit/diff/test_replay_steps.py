"""``compare replay`` of a step that lies some steps behind the checkpoint that it begins at."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import Command
from made_runs import changed, with_metric
from real_runs import real_run

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def sparse(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four steps, of which the last alone was saved."""
    return real_run(tiny_model, tmp_path_factory.mktemp("runs") / "a", max_steps=4, checkpoint={"every": 0})


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (["--set", "policy.max_grad_norm=0.01"], "weights"),
        (["--set", "generation.temperature=0.5"], "tokens"),
        (["--set", "normalize_std=false", "--only", "trainer"], "advantages"),
    ],
)
def test_a_setting_is_that_of_the_asked_step_alone(
    sparse: Path, nemorl: Command, options: list[str], part: str
) -> None:
    done = nemorl("compare", "replay", sparse, "--step", 4, *options)
    answer = nemorl("compare", "replay", sparse, "--step", 4, *options, "--json").json
    assert (answer["parting"]["step"], answer["parting"]["part"]) == (4, part)
    assert {one["step"] for one in answer["steps_before"] if one["equal"] is not False} == {1, 2, 3}
    assert not [one for one in answer["steps_before"] if one["equal"] is False]
    assert "PART OF STEP 4" in done.out


def test_steps_that_cannot_be_made_again_are_not_blamed_on_the_setting(
    sparse: Path, tmp_path: Path, nemorl: Command
) -> None:
    copy = changed(sparse, tmp_path / "copy", with_metric("train/loss", 7.0, 2))
    done = nemorl("compare", "replay", copy, "--step", 4, "--set", "policy.max_grad_norm=0.01")
    assert "differ already at step 2 in the loss" in " ".join(done.out.split())


def test_the_tables_name_the_step_that_they_are_of(sparse: Path, tmp_path: Path, nemorl: Command) -> None:
    copy = changed(sparse, tmp_path / "copy", with_metric("train/loss", 7.0, 2))
    done = nemorl("compare", "replay", copy, "--step", 4)  # made in one go from the beginning, and parts at step 2
    assert ("PART OF STEP 2" in done.out, "METRIC OF STEP 2" in done.out) == (True, True)
