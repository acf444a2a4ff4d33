"""``compare steps`` on real runs, each of which was told something else: where they part follows from what it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from made_runs import changed, with_version, with_weight
from nemorl_insight.diff.run_files import RunFiles
from nemorl_insight.diff.walking import walk
from real_runs import real_run

pytestmark = pytest.mark.full

RATE = {"optimizer": {"lr": 1e-3}}
DIFFERENT: dict[str, tuple[dict[str, Any], int, str, str]] = {
    "another seed": ({"seed": 7}, 1, "data", "prompt"),
    "data order": ({"shuffle": False}, 1, "data", "prompt"),
    "temperature": ({"generation": {"temperature": 0.9}}, 1, "tokens", "token"),
    "reward": ({"environment": {"pattern": r".*\d.*"}}, 1, "rewards", "reward"),
    "advantage normalisation": ({"normalize_std": False}, 1, "advantages", "advantage"),
    "loss coefficient": ({"kl_penalty": 0.5}, 2, "loss", "train/loss"),  # in the first step the KL is 0
    "loss aggregation": ({"loss_aggregation": "sequence"}, 1, "logprobs", "loss weight"),
    "clipped ratio": ({"num_minibatches": 2, "clip_low": 0.001, "clip_high": 0.001}, 2, "loss", "train/"),
    "learning rate": ({"policy": RATE}, 1, "weights", "train/lr"),
    "gradient clipping": ({"policy": {"max_grad_norm": 0.01}}, 1, "weights", "policy/model: "),
}


@pytest.fixture(scope="module")
def runs(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    real_run(tiny_model, folder / "plain")
    real_run(tiny_model, folder / "halves", num_minibatches=2)
    return folder


@pytest.mark.parametrize("name", DIFFERENT)
def test_two_runs_part_where_their_difference_takes_effect(
    runs: Path, tiny_model: Path, tmp_path: Path, name: str
) -> None:
    changes, step, part, quantity = DIFFERENT[name]
    first = runs / ("halves" if "num_minibatches" in changes else "plain")
    found = walk(RunFiles.of(first), RunFiles.of(real_run(tiny_model, tmp_path / "other", **changes)))
    assert found.parting is not None
    assert found.parting.point is not None
    assert (found.parting.step, found.parting.stage) == (step, part)
    assert found.parting.point.quantity.startswith(quantity)
    assert found.suspects


def test_two_runs_of_one_config_are_equal_and_a_changed_weight_or_version_is_seen(
    runs: Path, tiny_model: Path, tmp_path: Path
) -> None:
    again = real_run(tiny_model, tmp_path / "again")
    assert not walk(RunFiles.of(runs / "plain"), RunFiles.of(again)).differs
    weight = changed(again, tmp_path / "weight", with_weight(2, "model.norm.weight", 0.5))
    parting = walk(RunFiles.of(again), RunFiles.of(weight)).parting
    assert parting is not None
    assert (parting.step, parting.stage) == (2, "weights")
    version = changed(again, tmp_path / "version", with_version("0.2.0"))
    assert {setting.kind for setting in walk(RunFiles.of(again), RunFiles.of(version)).suspects} == {"plugins"}
