"""PPO teaches a random model of 40,000 weights to answer in digits, and its critic to foresee rewards, in seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from nemorl.config.load import load_config
from nemorl_cli.console import Console
from tiers import only

pytestmark = [pytest.mark.full, pytest.mark.slow]

ROWS = [{"prompt": f"{a}+{b}="} for a in range(9) for b in range(9)]
VARIANTS: dict[str, dict[str, Any]] = {
    "kl_in_reward": {},
    "kl_in_loss": {"kl_in": "loss", "value_clip": 0.5},
    "vapo": {
        "kl_penalty": 0,
        "critic_warmup_steps": 3,
        "num_minibatches": 4,
        "num_epochs_per_rollout": 1,
        "gae_lambda_value": 1.0,
        "length_adaptive_alpha": 0.5,
        "clip_high": 0.28,
        "positive_nll_weight": 0.1,
    },
}


def train(model: Path, run_dir: Path, reward: Any, **knobs: Any) -> list[dict[str, float]]:
    """The training metrics of each step."""
    config = load_config(
        {
            "algorithm": "ppo",
            "model": str(model),
            "policy": {"init": "random", "max_sequence_tokens": 32, "optimizer": {"lr": 1e-2}},
            "critic": {"optimizer": {"lr": 3e-3}},
            "generation": {"max_new_tokens": 8},
            "num_prompts_per_step": 6,
            "num_generations_per_prompt": 4,
            "validation": {"every": 0, "at_end": False},
            "run_dir": str(run_dir),
            **knobs,
        }
    )
    history = config.build().fit(ROWS, reward, console=Console(quiet=True)).history
    return [record for record in history if "train/reward" in record]


def share_of_digits(prompt: str, response: str) -> float:
    return sum(character.isdigit() for character in response) / max(1, len(response))


@pytest.mark.parametrize("variant", only("vapo", of=VARIANTS))
def test_a_random_model_learns_to_write_digits(variant: str, tiny_model: Path, tmp_path: Path) -> None:
    steps = train(tiny_model, tmp_path / "run", share_of_digits, max_steps=30, **VARIANTS[variant])
    rewards = [step["train/reward"] for step in steps]
    first, last = (sum(part) / len(part) for part in (rewards[:3], rewards[-3:]))
    assert first < 0.3  # 10 of 89 tokens are digits
    assert last > 0.8


def test_the_critic_comes_to_foresee_which_prompts_pay(tiny_model: Path, tmp_path: Path) -> None:
    def pays(prompt: str, response: str) -> float:
        return float(int(prompt[0]) >= 5)

    steps = train(tiny_model, tmp_path / "run", pays, max_steps=21, critic_warmup_steps=20, gae_lambda_value=1.0)
    explained = [step["train/critic/explained_var"] for step in steps]
    assert max(explained[:2]) < 0.3
    assert min(explained[-3:]) > 0.8
