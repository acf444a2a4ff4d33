"""Distillation with two training workers gives the numbers of one process: student and teacher are both sharded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nemorl
import pytest
from nemorl_cli.console import Console
from nemorl_testing.models import load_reference, tiny_model
from tiers import only

pytestmark = [pytest.mark.full, pytest.mark.ray, pytest.mark.slow, pytest.mark.usefixtures("private_ray")]

ROWS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(9) for b in range(9)]
WATCHED = ("train/loss", "train/reverse_kl", "train/grad_norm", "train/total_num_tokens")


def train(algorithm: str, run_dir: Path, cluster: dict[str, Any]) -> Any:
    config = nemorl.load_config(
        {
            "algorithm": algorithm,
            "model": str(tiny_model(num_hidden_layers=1)),
            "teacher": {"model": str(tiny_model(seed=11)), "precision": "float32"},
            "num_prompts_per_step": 8,
            "num_generations_per_prompt": 2,
            "policy": {"optimizer": {"lr": 1e-3, "eps": 1e-4}, "max_sequence_tokens": 32},
            "generation": {"max_new_tokens": 6},
            "validation": {"every": 0, "at_end": False},
            "checkpoint": {"every": 0},
            "max_steps": 2,
            "cluster": cluster,
            "run_dir": str(run_dir),
        }
    )
    return config.build().fit(ROWS, console=Console(quiet=True))


@pytest.mark.parametrize("algorithm", only("distillation", of=("distillation", "opd")))
def test_two_workers_equal_one_process(algorithm: str, tmp_path: Path) -> None:
    alone = train(algorithm, tmp_path / "alone", {"gpus_per_node": 0})
    ray = {"launcher": "ray", "gpus_per_node": 0, "workers_per_node": 2, "cpus_per_worker": 0.5}
    together = train(algorithm, tmp_path / "together", ray)
    for one, two in zip(alone.history, together.history, strict=True):
        assert [two[name] for name in WATCHED] == pytest.approx([one[name] for name in WATCHED], rel=1e-4)
    models = [load_reference(result.run_dir / "model").state_dict() for result in (alone, together)]
    assert all((models[0][name] - models[1][name]).abs().max() < 1e-4 for name in models[0])
    logs = {path.name for path in (together.run_dir / "logs").iterdir()}
    assert {"teacher-on-DTensor-0.log", "teacher-on-DTensor-1.log"} <= logs
