"""KTO and ORPO on two Ray workers are what they are in one process: one reference point, one average of tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from nemorl.config import load_config
from nemorl.run import TrainResult
from nemorl_cli.console import Console

pytestmark = [pytest.mark.full, pytest.mark.ray, pytest.mark.slow, pytest.mark.usefixtures("private_ray")]

ROWS = [{"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": str(a * b + 7)} for a in range(5) for b in range(5)]
NAMES = {"train/loss", "train/grad_norm", "train/reference_point", "train/sft_loss", "validation/loss"}


def train(algorithm: str, model: Path, run_dir: Path, cluster: dict[str, Any]) -> TrainResult:
    config: Any = load_config({
        "algorithm": algorithm,
        "model": str(model),
        "policy": {"init": "random", "optimizer": {"lr": 1e-3}},
        "batch_size": 5,
        "beta": 0.5,
        "max_steps": 3,
        "cluster": cluster,
        "run_dir": str(run_dir),
    })  # fmt: skip
    data = {"train": ROWS[:20], "validation": ROWS[20:]}
    result: TrainResult = config.build().fit(dataset=data, console=Console(quiet=True))
    return result


@pytest.mark.parametrize("algorithm", ["kto", "orpo"])
def test_two_workers_compute_what_one_process_does(algorithm: str, tiny_model: Path, tmp_path: Path) -> None:
    alone = train(algorithm, tiny_model, tmp_path / "alone", {"gpus_per_node": 0})
    two = {"launcher": "ray", "workers_per_node": 2, "cpus_per_worker": 0.5}
    together = train(algorithm, tiny_model, tmp_path / "together", two)
    compared = 0
    for one, other in zip(alone.history, together.history, strict=True):
        for name in one.keys() & NAMES:
            assert other[name] == pytest.approx(one[name], abs=1e-5, rel=1e-4), (one["step"], name)
            compared += 1
    assert compared >= 9
