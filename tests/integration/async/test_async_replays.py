"""``nemorl compare replay`` of runs whose rollouts ran beside training, on a real Ray."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from nemorl.config.load import load_config
from nemorl_cli.console import Console
from nemorl_cli.report.records.reading import read_records
from nemorl_insight.diff.replaying import Only, Replay, compare, compare_before, make
from nemorl_insight.diff.run_files import RunFiles
from real_runs import config_of
from recorded_messages import Raises
from tiers import only

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.usefixtures("private_ray")]
AHEAD = {
    "rollouts": {"mode": "async", "max_staleness": 1},
    "importance_correction": "truncated",
    "cluster": {"workers_per_node": 2, "colocated": False, "cpus_per_worker": 0.5},
}


@pytest.fixture(scope="module")
def ahead(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three steps, the later ones from rollouts that were begun before them."""
    folder = tmp_path_factory.mktemp("runs") / "ahead"
    config = load_config({**config_of(tiny_model, max_steps=3), **AHEAD, "run_dir": str(folder)})
    config.build().fit(console=Console(quiet=True))
    return folder


def test_rollouts_ran_ahead(ahead: Path) -> None:
    versions = [(record["step"], record["weight_versions"]) for record in read_records(ahead, split="train")]
    assert any(min(steps) < step - 1 for step, steps in versions)


def without_checkpoints(run: Path, folder: Path, *steps: int) -> Path:
    shutil.copytree(run, folder)
    for step in steps:
        shutil.rmtree(folder / f"checkpoints/step_{step:06}")
    return folder


@pytest.mark.parametrize("step", only(2, of=(1, 2, 3)))
def test_a_step_whose_samples_were_begun_before_it_is_made_again_bit_for_bit(
    ahead: Path, tmp_path: Path, step: int
) -> None:
    replay = Replay(RunFiles.of(ahead), step, tmp_path / "replay")
    make(replay, Console(quiet=True))
    found = compare(replay)
    assert found.parting is None
    assert [finding.stage for finding in found.findings if finding.is_exact] == [
        "advantages", "logprobs", "loss", "gradient", "weights"
    ]  # fmt: skip


@pytest.mark.parametrize("only", only("trainer", of=(None, "trainer")))
def test_steps_between_the_checkpoint_and_the_step_learn_from_the_record_as_well(
    ahead: Path, tmp_path: Path, only: Only | None
) -> None:
    sparse = without_checkpoints(ahead, tmp_path / "sparse", 1, 2)
    replay = Replay(RunFiles.of(sparse), 3, tmp_path / "replay", only=only)
    make(replay, Console(quiet=True))
    found, before = compare(replay), compare_before(replay)
    assert (found.parting, before and before.parting) == (None, None)
    assert before is not None
    assert {finding.step for finding in before.findings} == {1, 2}


def test_what_the_record_lacks_of_rollouts_that_ran_ahead_is_named(ahead: Path, tmp_path: Path, raises: Raises) -> None:
    sparse = without_checkpoints(ahead, tmp_path / "sparse", 1, 2)
    (sparse / "records/train/step_000002.parquet").unlink()
    with raises(ValueError, 32, "groups"):
        make(Replay(RunFiles.of(sparse), 3, tmp_path / "replay"), Console(quiet=True))


def test_a_setting_of_the_sampler_shows_nothing_where_samples_come_from_the_record(
    ahead: Path, tmp_path: Path, raises: Raises
) -> None:
    with raises(ValueError, "generation.temperature=0.5"):
        make(Replay(RunFiles.of(ahead), 2, tmp_path / "a", ["generation.temperature=0.5"]), Console(quiet=True))
