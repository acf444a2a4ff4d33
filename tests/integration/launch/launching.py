"""What tests of all launchers do: a small run, the command ``nemorl launch``, and what it left behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from nemorl_ops.launch import launchers
from nemorl_ops.launch.base import Launch, Status
from slurm_cluster import await_true

LONG = 100_000
"""Steps of a run that does not end by itself while a test looks."""
START_S, END_S = 900, 600
"""How long a run may take to start, and to end, on a machine that does ten other things: whoever waits longer fails."""


def write_run(folder: Path, model: Path, **launcher: Any) -> None:
    """``run.json``: GRPO with that model; ``launcher`` is its section ``launch``."""
    config = {
        "algorithm": "grpo",
        "model": str(model),
        "policy": {"init": "random", "max_sequence_tokens": 64},
        "data": "arithmetic",
        "environment": "math",
        "num_prompts_per_step": 4,
        "num_generations_per_prompt": 4,
        "generation": {"max_new_tokens": 8},
        "validation": {"every": 0, "at_end": False},
        "checkpoint": {"every": 5, "export": False},
        "cluster": {"workers_per_node": 1},
        "launch": {"secrets": ["HF_TOKEN"], "grace_s": 60, **launcher},
    }
    (folder / "run.json").write_text(json.dumps(config))


class Launches:
    """A folder from which runs are launched."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self.folder, self.environment = folder, {**os.environ, **environment}

    def launch(self, *arguments: str) -> Any:
        """What ``nemorl launch … --json`` says."""
        done = self.nemorl("launch", *arguments, "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def nemorl(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "nemorl", *arguments]
        return subprocess.run(
            command, cwd=self.folder, env=self.environment, capture_output=True, text=True, check=False
        )

    def status(self, name: str) -> Status:
        """What `nemorl launch status` says, without a process of its own for each question."""
        launch = Launch.read(self.folder / "launches" / name)
        return launchers.recorded(launch.launcher, launch.options).status(launch)

    def await_state(self, name: str, state: str, limit_s: float = END_S) -> Status:
        await_true(lambda: self.status(name).state == state, limit_s, lambda: self.explain(name))
        return self.status(name)

    def steps(self, name: str) -> list[int]:
        """Steps that the run has recorded, in the order in which they were written."""
        path = self.folder / "runs" / name / "metrics.jsonl"
        records = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
        return [record["step"] for record in records if "train/loss" in record]

    def await_step(self, name: str, step: int) -> None:
        await_true(lambda: max(self.steps(name), default=0) >= step, START_S, lambda: self.explain(name))

    def attempt(self, name: str, number: int) -> Path:
        return self.folder / "launches" / name / f"attempt-{number}"

    def explain(self, name: str) -> str:
        """The end of each log."""
        logs = sorted((self.folder / "launches" / name).rglob("*.log"))
        return "".join(f"\n== {log.name}\n{log.read_text()[-1500:]}" for log in logs)

    def holders(self, secret: str) -> list[Path]:
        """Files below that contain it."""
        return [path for path in self.folder.rglob("*") if path.is_file() and secret.encode() in path.read_bytes()]


def command_lines() -> str:
    """Of all processes of this machine."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            found.append(path.read_bytes().decode(errors="replace"))
    return "\n".join(found)
