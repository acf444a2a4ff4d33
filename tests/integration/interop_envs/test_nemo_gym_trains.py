"""A run whose episodes are played by a server of NeMo-Gym's protocol, with a random model of 40,000 weights."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from nemorl.config.load import load_config
from nemorl_cli.console import Console
from nemorl_testing.models import tiny_model

STAND_IN = Path(__file__).parents[2] / "unit/interop_envs/gym_stand_in.py"


def train(folder: Path, steps: int) -> list[dict[str, float]]:
    """Two answers an episode; the reward is the share of digits in the second."""
    rows = folder / "rows.jsonl"
    tasks = [
        {
            "responses_create_params": {"input": [{"role": "user", "content": f"{a}+{b}="}]},
            "agent_ref": {"type": "responses_api_agents", "name": "toy_simple_agent"},
            "rounds": 2,
            "wanted": "digits",
        }
        for a in range(2, 10)
        for b in range(2, 10)
    ]
    rows.write_text("\n".join(map(json.dumps, tasks)))
    config: Any = load_config(
        {
            "algorithm": "grpo",
            "model": str(tiny_model()),
            "data": {"name": "nemo_gym", "path": str(rows)},
            "environment": {
                "name": "nemo_gym",
                "start": {"config_paths": ["toy.yaml"], "command": [sys.executable, str(STAND_IN)]},
            },
            "policy": {"init": "random", "max_sequence_tokens": 64, "optimizer": {"lr": 5e-3}},
            "generation": {"max_new_tokens": 6},
            "num_prompts_per_step": 4,
            "num_generations_per_prompt": 8,
            "max_steps": steps,
            "validation": {"every": 0, "at_end": False},
            "run_dir": str(folder / "run"),
        }
    )
    history: list[dict[str, float]] = config.build().fit(console=Console(quiet=True)).history
    return history


@pytest.mark.slow
def test_episodes_of_a_gym_are_trained_whole(tmp_path: Path) -> None:
    [step] = train(tmp_path, 1)
    assert step["train/environment/calls"] == 2.0
    assert step["train/environment/outcome_finished"] == 1.0


@pytest.mark.full
def test_a_gym_teaches_digits(tmp_path: Path) -> None:
    history = train(tmp_path, 40)
    assert history[0]["train/reward"] < 0.3
    assert history[-1]["train/reward"] > 0.75
