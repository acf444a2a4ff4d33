"""Whole runs on the simulated device are those of the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from nemorl.config.load import load_config
from nemorl.types import Score
from nemorl_cli.console import Console
from nemorl_testing.models import tiny_model
from nemorl_testing.simulated_device.tensors import races

STEPS = 4
RUNS: dict[str, tuple[dict[str, Any], bool]] = {
    "grpo": ({"algorithm": "grpo", "kl_penalty": 0.05}, False),
    "grpo, models take turns": ({"algorithm": "grpo", "kl_penalty": 0.05}, True),
    "ppo": ({"algorithm": "ppo"}, False),
}
"""Settings, and whether what does not work leaves the device."""
SAME = ("train/reward/mean", "train/loss", "train/grad_norm")


def share_of_digits(prompt: str, response: str) -> Score:
    return Score(sum(character.isdigit() for character in response) / max(1, len(response)))


def history(name: str, cluster: dict[str, Any], folder: Path) -> list[dict[str, float]]:
    settings, take_turns = RUNS[name]
    config = load_config(
        {
            "model": str(tiny_model()),
            "policy": {"init": "random", "max_sequence_tokens": 32, "optimizer": {"lr": 5e-3, "eps": 1e-3}},
            "generation": {"max_new_tokens": 8},
            "num_prompts_per_step": 4,
            "num_generations_per_prompt": 4,
            "validation": {"every": 0, "at_end": False},
            "max_steps": STEPS,
            "run_dir": str(folder),
            "cluster": {"launcher": "local", "take_turns": take_turns, **cluster},
            **settings,
        }
    )
    rows = [{"prompt": f"{a}+{b}="} for a in range(2, 6) for b in range(2, 6)]
    return config.build().fit(rows, share_of_digits, console=Console(quiet=True)).history


@pytest.mark.parametrize("name", RUNS)
def test_a_run_is_that_of_the_cpu(name: str, device: str, tmp_path: Path) -> None:
    accelerator = {"accelerator": torch.device(device).type, "gpus_per_node": 1}
    wanted = history(name, {"gpus_per_node": 0}, tmp_path / "cpu")
    found = history(name, accelerator, tmp_path / "simulated")
    assert len(found) == len(wanted) == STEPS
    for step, (one, other) in enumerate(zip(found, wanted, strict=True)):
        for metric in SAME:
            if metric in other:
                assert one[metric] == pytest.approx(other[metric], rel=1e-4, abs=1e-5), (step, metric)
    assert not races
