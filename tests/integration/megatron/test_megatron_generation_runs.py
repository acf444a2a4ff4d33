"""Runs whose generator lives in the trainer's processes: nothing travels between them, and the policy learns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("megatron.core", reason="megatron-core is not installed: pip install nemorl-megatron")

from nemorl.config.load import load_config
from nemorl_cli.console import Console

pytestmark = [pytest.mark.megatron, pytest.mark.slow]

TWO = {"launcher": "ray", "workers_per_node": 2, "cpus_per_worker": 0.5}


def share_of_digits(prompt: str, response: str) -> float:
    return sum(character.isdigit() for character in response) / max(1, len(response))


def train(model: Path, run_dir: Path, steps: int, **changes: Any) -> list[dict[str, Any]]:
    """The history of a GRPO run; ``changes`` are of policy, its backend and the cluster."""
    config = load_config(
        {
            "algorithm": "grpo",
            "model": str(model),
            "policy": {
                "init": "random",
                "max_sequence_tokens": 32,
                "optimizer": {"lr": 5e-3},
                "backend": {"name": "megatron", **changes.get("backend", {})},
                **changes.get("policy", {}),
            },
            "generation": {"backend": "megatron", "max_new_tokens": 8},
            "num_prompts_per_step": 4,
            "num_generations_per_prompt": 8,
            "validation": {"every": 0, "at_end": False},
            "max_steps": steps,
            "run_dir": str(run_dir),
            "cluster": changes.get("cluster", {"gpus_per_node": 0}),
        }
    )
    assert config.place().is_attached
    rows = [{"prompt": f"{a}+{b}="} for a in range(2, 10) for b in range(2, 10)]
    return config.build().fit(rows, share_of_digits, console=Console(quiet=True)).history


@pytest.mark.full
def test_a_random_model_learns_to_write_digits(tiny_model: Path, tmp_path: Path) -> None:
    history = train(tiny_model, tmp_path / "run", 40)
    rewards = [record["train/reward"] for record in history if "train/reward" in record]
    first, last = (sum(part) / len(part) for part in (rewards[:3], rewards[-3:]))
    assert first < 0.3  # 10 of 89 tokens are digits
    assert last > 0.75


@pytest.fixture(scope="module")
def alone(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return train(tiny_model, tmp_path_factory.mktemp("alone") / "run", 3)


@pytest.mark.ray
@pytest.mark.usefixtures("private_ray")
@pytest.mark.parametrize(
    "ways",
    [
        pytest.param({"policy": {"tensor_parallel_size": 2}}, id="tp2", marks=pytest.mark.full),
        pytest.param({"backend": {"pipeline_parallel_size": 2}}, id="pp2", marks=pytest.mark.full),
        pytest.param({}, id="dp2", marks=pytest.mark.full),
    ],
)
def test_two_workers_say_and_learn_what_one_process_does(
    ways: dict[str, Any], alone: list[dict[str, Any]], tiny_model: Path, tmp_path: Path
) -> None:
    together = train(tiny_model, tmp_path / "together", 3, cluster=TWO, **ways)
    for one, other in zip(alone, together, strict=True):
        assert other["train/reward"] == one["train/reward"]
        assert other["train/loss"] == pytest.approx(one["train/loss"], abs=1e-4)
        assert other["train/logprob_error/max"] < 1e-4
