"""Recipes of tinker-cookbook, as they are, run to their end and learn. Without the cookbook this is skipped."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "tinker_recipes.py"


@pytest.mark.slow
def test_supervised_and_reward_driven_recipes_learn(tmp_path: Path) -> None:
    pytest.importorskip("tinker", reason="the package tinker is not installed")
    pytest.importorskip("tinker_cookbook", reason="tinker-cookbook is not installed: put its folder into PYTHONPATH")
    names = ["chat_sl", "math_rl sync"]
    line = [sys.executable, str(SCRIPT), "--work", str(tmp_path), "--json", *(f"--only={name}" for name in names)]
    found = subprocess.run(line, capture_output=True, text=True, timeout=600, check=False)
    outcomes = [json.loads(line) for line in found.stdout.splitlines()]
    assert [(each["name"], each["error"], each["learned"]) for each in outcomes] == [(name, "", True) for name in names]
    # On-policy: the trainer says of a sampled token what the sampler said, in float32.
    assert abs(outcomes[1]["kl"]["optim/kl_sample_train_v1"]) < 1e-5
