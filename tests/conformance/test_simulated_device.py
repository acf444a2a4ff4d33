"""``dtensor`` and ``hf`` under a GPU's rules, seen without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiers import only

FOLDER = Path(__file__).parents[1] / "simulated_device"
WITHIN_S = 1200.0


def run(*chosen: str) -> None:
    environment = {**os.environ, "SIMULATED_DEVICE": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", *chosen]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=WITHIN_S)
    assert done.returncode == 0, done.stdout[-6000:]


def test_the_device_has_a_gpus_rules() -> None:
    run(str(FOLDER / "test_rules.py"))


@pytest.mark.slow
@pytest.mark.parametrize("part", only("test_simulated_runs.py", of=("test_engines.py", "test_simulated_runs.py")))
def test_engines_and_runs_keep_to_them(part: str) -> None:
    run(str(FOLDER / part))


@pytest.mark.slow
def test_whoever_writes_a_backend_can_ask_for_it(tmp_path: Path) -> None:
    answer = tmp_path / "answer.json"
    asked = ["generation_backends", "hf", str(answer), "--device", "sim"]
    done = subprocess.run([sys.executable, "-m", "nemorl_testing.smoke", *asked], check=False, timeout=WITHIN_S)
    assert done.returncode == 0
    assert json.loads(answer.read_text())["passed"]
