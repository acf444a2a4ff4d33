"""Runs whose engines have devices of their own, what kills them, and what must not depend on that."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import small_runs
from nemorl.run import TrainResult
from nemorl_rl.callbacks import Callback

STEPS = 4
LARGER: dict[str, Any] = {
    "policy": {"init": "random", "optimizer": {"lr": 1e-3}, "max_sequence_tokens": 128},
    "num_prompts_per_step": 8,
    "generation": {"max_new_tokens": 32},
    "max_steps": STEPS,
}
LOSSES = ("train/loss", "train/grad_norm")
COUNTS = ("step", "train/reward", "train/total_num_tokens", "train/num_samples")


def apart(engines: int, **more: Any) -> dict[str, Any]:
    """One trainer, and so many engines."""
    cluster = {"workers_per_node": 1 + engines, "colocated": False, "generation_workers": engines}
    return {**cluster, "cpus_per_worker": 0.2, **more}


def settings(model: Path, run_dir: Path, cluster: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return small_runs.settings(model, run_dir, cluster, **{**LARGER, **changes})


def train(model: Path, run_dir: Path, cluster: dict[str, Any], *callbacks: object, **changes: Any) -> TrainResult:
    return small_runs.train(model, run_dir, cluster, *callbacks, **{**LARGER, **changes})


def learnt(history: Any) -> list[dict[str, float]]:
    return [{name: record[name] for name in (*COUNTS, *LOSSES)} for record in history if "train/loss" in record]


class Kill(Callback):
    """SIGKILL to engines, a moment after a step began: in the middle of its rollouts."""

    def __init__(self, step: int, engines: slice, delay_s: float = 0.05) -> None:
        self.step, self.engines, self.delay_s = step, engines, delay_s
        self.steps: list[tuple[int, float]] = []
        """Each step and the moment at which it began"""

    def on_step_begin(self, trainer: Any, step: int) -> None:
        self.steps.append((trainer.generation.workers.data_parallel_size, time.monotonic()))
        if step == self.step:
            pids = [facts.pid for facts in trainer.generation.workers.facts[self.engines]]
            threading.Timer(self.delay_s, kill, (pids,)).start()


def kill(pids: list[int]) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def deaths(run_dir: Path) -> int:
    return (run_dir / "events.jsonl").read_text().count("died during generate")
