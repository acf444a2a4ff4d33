"""A run whose process is killed again and again, also while a checkpoint is being written, ends as one that was not."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from nemorl.base.files.jsonl import read_jsonl
from nemorl_rl.models.tiny import write_tiny_model
from safetensors.torch import load_file

pytestmark = [pytest.mark.slow, pytest.mark.full]

KILLS, STEPS = 5, 12
FIT = """
import json, sys
import nemorl
from nemorl_cli.console import Console

rows = [{"prompt": f"{n}+1=", "response": str(n + 1)} for n in range(9)]
nemorl.load_config(json.loads(sys.argv[1])).build().fit(rows, resume=True, console=Console(quiet=True))
"""


def config(model: Path, run_dir: Path) -> str:
    settings: dict[str, Any] = {
        "algorithm": "sft",
        "model": str(model),
        "run_dir": str(run_dir),
        "max_steps": STEPS,
        "batch_size": 2,
        "checkpoint": {"every": 1, "keep_last": 2, "asynchronous": True, "export": False},
        "policy": {"init": "random", "max_sequence_tokens": 32, "optimizer": {"lr": 1e-3}},
    }
    return json.dumps(settings)


def test_a_run_that_is_killed_while_it_saves_loses_and_doubles_no_step(tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 4}
    model, chance = write_tiny_model(tmp_path / "model", num_key_value_heads=4, **sizes), random.Random(5)
    subprocess.run([sys.executable, "-c", FIT, config(model, tmp_path / "whole")], check=True, timeout=300)
    ended_while_writing = 0
    for _ in range(KILLS):
        process = subprocess.Popen([sys.executable, "-c", FIT, config(model, tmp_path / "run")])
        folder = tmp_path / "run/checkpoints"
        while process.poll() is None and not list(folder.glob(".writing_*")):
            time.sleep(0.001)
        time.sleep(chance.uniform(0, 0.05))
        process.send_signal(signal.SIGKILL)
        process.wait()
        ended_while_writing += bool(list(folder.glob(".writing_*")))
    assert ended_while_writing > 0, "no kill met a checkpoint that was being written"
    subprocess.run([sys.executable, "-c", FIT, config(model, tmp_path / "run")], check=True, timeout=300)
    records = [
        [(r["step"], r["train/loss"]) for r in read_jsonl(tmp_path / name / "metrics.jsonl") if "train/loss" in r]
        for name in ("whole", "run")
    ]
    assert records[0] == records[1]
    assert len(records[0]) == STEPS
    [one], [other] = (
        list((tmp_path / name / f"checkpoints/step_{STEPS:06d}/policy/model").iterdir()) for name in ("whole", "run")
    )
    weights = [load_file(file) for file in (one, other)]
    assert all(weights[0][name].equal(weights[1][name]) for name in weights[0])
