"""A random model of 40,000 weights learns sums of one digit from its own lucky guesses, on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from nemorl.config.load import load_config
from nemorl_cli.console import Console
from nemorl_rl.models.tiny import write_tiny_model

SIZES: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}


@pytest.mark.slow
def test_raft_learns_to_add(tmp_path: Path) -> None:
    config = load_config(
        {
            "algorithm": "raft",
            "model": str(write_tiny_model(tmp_path / "model", **SIZES)),
            "policy": {"init": "random", "max_sequence_tokens": 16, "optimizer": {"lr": 1e-2}},
            "data": {"name": "arithmetic", "max_value": 4, "num_train": 15, "num_validation": 0},
            "environment": "math",
            "generation": {"max_new_tokens": 1},
            "num_prompts_per_step": 15,
            "num_generations_per_prompt": 32,
            "min_reward": 1.0,
            "max_steps": 100,
            "validation": {"every": 0, "at_end": False},
            "run_dir": str(tmp_path / "run"),
        }
    )
    history = config.build().fit(console=Console(quiet=True)).history
    rewards = [record["train/reward"] for record in history if "train/reward" in record]
    first, last = (sum(part) / len(part) for part in (rewards[:3], rewards[-3:]))
    assert first < 0.05  # one of 97 tokens is right
    assert last > 0.6  # 0.76 to 1.0 by seed and machine: a sum that is never sampled is never learned
