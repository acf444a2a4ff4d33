"""Every variant of GRPO teaches a random model of 40,000 weights to answer in digits, on the CPU, in seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from nemorl.config.load import load_config
from nemorl.types import Score
from nemorl_cli.console import Console
from tiers import only

pytestmark = pytest.mark.slow

STEPS = 60
FAMILY: dict[str, dict[str, Any]] = {
    "grpo": {},
    "dapo": {},
    "dr_grpo": {},
    "gspo": {"num_minibatches": 4, "clip_low": 0.02, "clip_high": 0.03},  # wide: responses are short
    "cispo": {"num_minibatches": 4, "ratio_cap": 1.1},
    "rloo": {"kl_in": "reward"},
    "reinforce_plus_plus": {"num_prompts_per_step": 32, "num_generations_per_prompt": 1},
    "reinforce_plus_plus_baseline": {},
    "gdpo": {"reward_weights": {"digits": 1.0, "even": 0.5}},
    "maxrl": {},
    "sapo": {"num_minibatches": 4},
    "dppo": {"num_minibatches": 4},
    "vespo": {"num_minibatches": 4},
    "luspo": {"num_minibatches": 4, "clip_low": 0.02, "clip_high": 0.03},
    "gmpo": {"num_minibatches": 4},
    "dro": {"num_minibatches": 4},
    "clip_cov": {"num_minibatches": 4, "cov_fraction": 0.02, "cov_low": 0.1},
    "kl_cov": {"num_minibatches": 4, "cov_fraction": 0.02},
    "raw_reward": {"normalize_advantages": True},
    "optimal_token_baseline": {},
}


def share_of_digits(prompt: str, response: str) -> Score:
    """The share of digits, with that of even ones as a second reward."""
    size = max(1, len(response))
    digits = sum(character.isdigit() for character in response) / size
    return Score(digits, {"digits": digits, "even": sum(character in "02468" for character in response) / size})


@pytest.mark.parametrize("algorithm", only("grpo", of=FAMILY))
def test_a_random_model_learns_to_write_digits(algorithm: str, tiny_model: Path, tmp_path: Path) -> None:
    config = load_config(
        {
            "algorithm": algorithm,
            "model": str(tiny_model),
            "policy": {"init": "random", "max_sequence_tokens": 32, "optimizer": {"lr": 5e-3}},
            "generation": {"max_new_tokens": 8},
            "num_prompts_per_step": 4,
            "num_generations_per_prompt": 8,
            "validation": {"every": 0, "at_end": False},
            "max_steps": STEPS,
            "run_dir": str(tmp_path / "run"),
            **FAMILY[algorithm],
        }
    )
    rows = [{"prompt": f"{a}+{b}="} for a in range(2, 10) for b in range(2, 10)]
    history = config.build().fit(rows, share_of_digits, console=Console(quiet=True)).history
    rewards = [record["train/reward/digits"] for record in history if "train/reward/digits" in record]
    assert len(rewards) == STEPS
    assert ("train/kl_penalty" in history[0]) == config.needs_reference
    first, last = (sum(part) / len(part) for part in (rewards[:3], rewards[-3:]))
    assert first < 0.3  # 10 of 89 tokens are digits
    assert last > 0.75
