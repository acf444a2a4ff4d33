"""A reward model trained on two Ray workers is the one that a single process trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from nemorl.run import TrainResult
from nemorl_cli.console import Console
from nemorl_preference.rm import RMConfig
from nemorl_preference.rm.environment import load_classifier
from safetensors.torch import load_file

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.usefixtures("private_ray")]

ROWS = [{"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": str(a * b + 7)} for a in range(5) for b in range(5)]
NAMES = {"train/loss", "train/grad_norm", "train/rewards_margin_mean", "train/num_valid_samples", "validation/loss"}


def train(model: Path, run_dir: Path, cluster: dict[str, Any]) -> TrainResult:
    config = RMConfig(
        model=str(model),
        policy={"init": "random", "optimizer": {"lr": 1e-3, "eps": 1e-3}},
        batch_size=5,
        center_loss_weight=0.01,
        max_steps=3,
        cluster=cluster,
        run_dir=run_dir,
    )
    data = {"train": ROWS[:20], "validation": ROWS[20:]}
    return config.build().fit(dataset=data, console=Console(quiet=True))


def test_two_workers_train_the_same_model(tiny_model: Path, tmp_path: Path) -> None:
    alone = train(tiny_model, tmp_path / "alone", {"gpus_per_node": 0})
    two = {"launcher": "ray", "workers_per_node": 2, "cpus_per_worker": 0.5}
    together = train(tiny_model, tmp_path / "together", two)
    for one, other in zip(alone.history, together.history, strict=True):
        for name in one.keys() & NAMES:
            assert other[name] == pytest.approx(one[name], abs=1e-5, rel=1e-4), (one["step"], name)
    weights = [load_file(run.run_dir / "model" / "model.safetensors") for run in (alone, together)]
    load_classifier(str(together.run_dir / "model"), "cpu", torch.float32)  # which refuses what is none
    assert weights[0].keys() == weights[1].keys()
    for name, tensor in weights[0].items():
        torch.testing.assert_close(weights[1][name], tensor, atol=1e-5, rtol=1e-4)
