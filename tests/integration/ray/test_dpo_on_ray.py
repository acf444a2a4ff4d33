"""DPO on two Ray workers: pairs stay together, and the run is that of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from nemorl.run import TrainResult
from nemorl_cli.console import Console
from nemorl_preference.dpo import DPOConfig
from tiers import only

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.usefixtures("private_ray")]

ROWS = [{"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": str(a * b + 7)} for a in range(5) for b in range(5)]
NAMES = {"train/loss", "train/grad_norm", "train/rewards_margin_mean", "train/num_valid_samples", "validation/loss"}


def train(model: Path, run_dir: Path, cluster: dict[str, Any], **knobs: Any) -> TrainResult:
    config = DPOConfig(**{
        "model": str(model),
        "policy": {"init": "random", "optimizer": {"lr": 1e-3}},
        "batch_size": 5,
        "beta": 0.5,
        "sft_loss_weight": 0.1,
        "max_steps": 3,
        "cluster": cluster,
        "run_dir": run_dir,
        **knobs,
    })  # fmt: skip
    data = {"train": ROWS[:20], "validation": ROWS[20:]}
    return config.build().fit(dataset=data, console=Console(quiet=True))


@pytest.mark.parametrize("reference", only(of=("precomputed", "model")))
def test_two_workers_compute_what_one_process_does(reference: str, tiny_model: Path, tmp_path: Path) -> None:
    alone = train(tiny_model, tmp_path / "alone", {"gpus_per_node": 0}, reference=reference)
    two = {"launcher": "ray", "workers_per_node": 2, "cpus_per_worker": 0.5}
    together = train(tiny_model, tmp_path / "together", two, reference=reference)
    for one, other in zip(alone.history, together.history, strict=True):
        for name in one.keys() & NAMES:
            assert other[name] == pytest.approx(one[name], abs=1e-5, rel=1e-4), (one["step"], name)
