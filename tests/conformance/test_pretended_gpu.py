"""Nothing that belongs on the GPU stays behind on the CPU, or the other way round: seen without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

CHECKS = Path(__file__).parents[1] / "pretended_gpu_checks.py"


@pytest.mark.slow
def test_losses_training_and_generation_keep_their_tensors_on_one_device() -> None:
    pytest.importorskip("torch.utils.backend_registration")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, str(CHECKS)], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1]) == {}
