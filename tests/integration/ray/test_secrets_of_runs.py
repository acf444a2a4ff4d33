"""Secrets of the environment are nowhere: not in a run's folder, logs, exports, Ray's sessions or process lists."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from hidden_secrets import found_in, holds

pytestmark = [pytest.mark.full, pytest.mark.slow]
ON_RAY = pytest.param("ray", marks=[pytest.mark.ray, pytest.mark.full])

NAMES = ("HF_TOKEN", "WANDB_API_KEY", "OPENAI_API_KEY", "ANTHROPIC_API_KEY", "NEMORL_SERVE_KEY", "DB_PASSWORD")
RUN = """
import json, os, sys
import nemorl
from nemorl.contracts.display import Silence
from nemorl_agents.gateway.gateway import Gateway

class Told:
    def on_step_end(self, step):
        if step == 1:
            print("first step", flush=True)
            sys.stdin.readline()

def refused(prompt, response):  # as a library does that puts a key into its message
    raise RuntimeError(f"401 for Bearer {os.environ['OPENAI_API_KEY']}")

config = nemorl.load_config({
    "algorithm": "grpo", "model": sys.argv[1], "run_dir": sys.argv[2], "max_steps": 2,
    "policy": {"init": "random", "max_sequence_tokens": 32}, "generation": {"max_new_tokens": 2},
    "num_prompts_per_step": 1, "num_generations_per_prompt": 2, "loggers": ["tensorboard"],
    "cluster": {"launcher": sys.argv[4], "cpus_per_worker": 0.5},
})
rows = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(4)]
with Gateway() as gateway:
    result = config.build().fit(rows, lambda p, response: float(len(response)), callbacks=[Told()], console=Silence())
print(json.dumps({"steps": result.steps}), flush=True)
config = nemorl.load_config({**json.loads(sys.argv[3]), "model": sys.argv[1]})
try:
    config.build().fit(rows, refused, console=Silence())
except Exception as error:
    print(type(error).__name__, flush=True)
"""


@pytest.mark.parametrize("launcher", ["local", ON_RAY])
def test_planted_secrets_are_found_nowhere(tiny_model: Path, tmp_path: Path, launcher: str) -> None:
    planted = {name: f"{name.lower()}-{secrets.token_urlsafe(24)}" for name in NAMES}
    failing = {"algorithm": "grpo", "run_dir": str(tmp_path / "failing"), "max_steps": 1, "policy": {"init": "random"}}
    environment = {**os.environ, **planted, "NEMORL_AUDIT": str(tmp_path / "audit")}
    with (tmp_path / "output.log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", RUN, str(tiny_model), str(tmp_path / "run"), json.dumps(failing), launcher],
            env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
        )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdout.readline()
        lists = b"".join(path.read_bytes() for path in _command_lines())
        assert not [name for name, secret in planted.items() if holds(lists, secret)], "in the process list"
        sessions = _sessions(process.pid)
        assert bool(sessions) is (launcher == "ray"), "Ray's folder is looked at while it is there"
        for folder in sessions:
            assert found_in(folder, planted) == []
        process.stdin.write("\n")
        process.stdin.flush()
        assert json.loads(process.stdout.readline()) == {"steps": 2}
        process.communicate(timeout=120)
    finally:
        process.kill()
        process.communicate()
    left = {path.name for path in (tmp_path / "run").iterdir()}
    assert {
        "config.yaml",
        "events.jsonl",
        "metrics.jsonl",
        "environment.json",
        "report.html",
        "model",
        "records",
    } <= left
    assert "failed" in (tmp_path / "failing" / "events.jsonl").read_text(), "of a run that failed, too"
    assert len([*(tmp_path / "audit").iterdir()]) == 2
    assert found_in(tmp_path, planted) == []


def _command_lines() -> list[Path]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            path.read_bytes()
        except OSError:
            continue
        found.append(path)
    return found


def _sessions(driver: int) -> list[Path]:
    """Folders of Ray that a driver made."""
    found = []
    for mark in Path("/tmp").glob("nemorl-ray-*/.nemorl-owner"):
        with suppress(OSError, ValueError):  # another run's, which comes or goes
            if json.loads(mark.read_text())["pid"] == driver:
                found.append(mark.parent)
    return found
