"""A run that began in one process goes on with other numbers of workers, and back, as if nothing had changed."""

from __future__ import annotations

from pathlib import Path

import nemorl
import pytest
from nemorl.base.files.jsonl import read_jsonl
from nemorl_cli.console import Console
from safetensors.torch import load_file
from small_runs import ROWS, digits, settings

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.full, pytest.mark.usefixtures("private_ray")]

SNAPSHOTS = ["checkpoint.asynchronous=true", "checkpoint.every=1"]
LAYOUTS: list[list[str]] = [
    [],
    ["cluster.launcher=ray", "cluster.workers_per_node=2", "policy.tensor_parallel_size=2", *SNAPSHOTS],
    ["cluster.launcher=ray", "cluster.workers_per_node=2", "policy.microbatch_tokens=24"],
]


def train(model: Path, run_dir: Path, steps: int, layout: list[str]) -> None:
    data = {"algorithm": "grpo", **settings(model, run_dir, {"cpus_per_worker": 0.5}, max_steps=steps)}
    nemorl.load_config(data, layout).build().fit(ROWS, digits, resume=True, console=Console(quiet=True))


def test_the_number_of_workers_and_how_they_share_the_model_may_change_on_resume(
    tiny_model: Path, tmp_path: Path
) -> None:
    train(tiny_model, tmp_path / "whole", 3, [])
    for steps, layout in enumerate(LAYOUTS, 1):
        train(tiny_model, tmp_path / "moved", steps, layout)
    names = ("step", "train/reward", "train/total_num_tokens", "train/loss", "train/grad_norm")
    whole, moved = (
        [{name: r[name] for name in names} for r in read_jsonl(tmp_path / run / "metrics.jsonl") if "train/loss" in r]
        for run in ("whole", "moved")
    )
    assert len(whole) == 3
    for one, other in zip(whole, moved, strict=True):
        assert other == pytest.approx(one, rel=1e-4, abs=1e-6)
    one, other = (load_file(tmp_path / run / "model/model.safetensors") for run in ("whole", "moved"))
    assert all(other[name].allclose(one[name], rtol=0, atol=5e-4) for name in one)
