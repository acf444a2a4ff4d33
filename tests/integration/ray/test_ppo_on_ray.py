"""PPO on a real Ray: a critic and a policy over two ranks learn what they learn in one process.

The policy has the ranks as shards of the batch, the critic as halves of each layer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from nemorl_cli.console import Console
from nemorl_ppo.config import PPOConfig
from safetensors.torch import load_file

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.usefixtures("private_ray")]

ROWS = [{"prompt": f"{a}+{b}="} for a in range(9) for b in range(9)]
STEPS = 3


def digits(prompt: str, response: str) -> float:
    return sum(character.isdigit() for character in response) / 8


def train(
    model: Path, run_dir: Path, cluster: dict[str, Any], **critic: Any
) -> tuple[list[dict[str, float]], dict[str, Any]]:
    """What each step computed, and the trained weights."""
    config = PPOConfig(**{
        "model": str(model),
        "policy": {"init": "random", "optimizer": {"lr": 1e-3, "eps": 1e-3}, "max_sequence_tokens": 64},
        "critic": {"optimizer": {"lr": 1e-3, "eps": 1e-3}, **critic},
        "critic_warmup_steps": 1,
        "num_prompts_per_step": 4,
        "num_generations_per_prompt": 2,
        "num_minibatches": 2,
        "num_epochs_per_rollout": 2,
        "value_clip": 0.2,
        "positive_nll_weight": 0.1,
        "generation": {"max_new_tokens": 8},
        "validation": {"every": 0, "at_end": False},
        "checkpoint": {"every": 0},
        "max_steps": STEPS,
        "cluster": cluster,
        "run_dir": run_dir,
        "seed": 3,
    })  # fmt: skip
    result = config.build().fit(dataset=ROWS, reward_fn=digits, console=Console(quiet=True))
    steps = [
        {name: value for name, value in record.items() if name.startswith("train/")}
        for record in result.history
        if "train/reward" in record
    ]
    return steps, load_file(result.run_dir / "model" / "model.safetensors")


@pytest.mark.full
def test_two_workers_learn_what_one_process_does(tiny_model: Path, tmp_path: Path) -> None:
    alone, weights = train(tiny_model, tmp_path / "alone", {"gpus_per_node": 0})
    two = {"launcher": "ray", "workers_per_node": 2, "cpus_per_worker": 0.5}
    together, found = train(tiny_model, tmp_path / "together", two, tensor_parallel_size=2)
    assert [step.keys() for step in together] == [step.keys() for step in alone]
    for one, other in zip(alone, together, strict=True):
        # Quantiles and the like of rounding errors are themselves rounding errors. Two workers share fewer tokens.
        apart = ("logprob_error", "gen_kl_error", "tree_ratio")
        compared = [name for name in one if not any(part in name for part in apart)]
        assert {n: other[n] for n in compared} == pytest.approx({n: one[n] for n in compared}, rel=1e-3, abs=2e-5)
    for name, tensor in weights.items():
        assert float((found[name] - tensor).abs().max()) < 1e-5, name
