"""The runs that meet faults: four steps on one layer, with everything that a run leaves in its folder."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import nemorl
from blows import Blow, Strikes
from faulty_files import Fault, arm
from nemorl_base.errors import NemorlError
from nemorl_rl.callbacks import Callback

STEPS = 4


class StopAfter(Callback):
    """Ends the run after a step, as a signal would."""

    def __init__(self, step: int) -> None:
        self.at = step

    def on_step_end(self, trainer: Any, step: int) -> None:
        if step == self.at:
            trainer.stop("for the test")


def digits(prompt: str, response: str) -> float:
    return float(sum(character.isdigit() for character in response))


RAY = {"launcher": "ray", "cpus_per_worker": 0.5, "worker_timeout_s": 45.0, "max_restarts": 20}
SUBJECTS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "sft": {"algorithm": "sft"},
    "saving beside the step": {"checkpoint": {"asynchronous": True}},
    "math environment": {"environment": {"name": "math", "timeout_s": 60}},
    "megatron": {"policy": {"backend": "megatron"}},
    "grpo on ray": {"cluster": {**RAY, "gpus_per_node": 0}},
    "asynchronous on ray": {
        "cluster": {**RAY, "workers_per_node": 2, "colocated": False},
        "rollouts": {"mode": "async", "max_staleness": 1},
        "importance_correction": "truncated",
    },
}
"""What the settings of each run say beyond those of the first."""
UNREWARDED = frozenset({"sft", "math environment"})
"""Subjects without a reward function."""
SAMPLING = {
    "num_prompts_per_step": 2,
    "num_generations_per_prompt": 2,
    "generation": {"max_new_tokens": 4},
}


def settings(model: str, run_dir: str, subject: str) -> dict[str, Any]:
    changes = SUBJECTS[subject]
    algorithm = changes.get("algorithm", "grpo")
    shared: dict[str, Any] = {
        "algorithm": algorithm,
        "model": model,
        "run_dir": run_dir,
        "max_steps": STEPS,
        "validation": {"every": 2, "max_samples": 2},
        "checkpoint": {"every": 1, "keep_last": 2, "keep_best": 1},
        "policy": {"init": "random", "max_sequence_tokens": 32, "optimizer": {"lr": 1e-3}},
        "data": {"name": "arithmetic", "max_value": 5, "num_train": 16, "num_validation": 2},
        "loggers": [],
        **({"batch_size": 2} if algorithm == "sft" else SAMPLING),
    }
    return {
        name: {**value, **changes.get(name, {})} if isinstance(value, dict) else value for name, value in shared.items()
    } | {name: value for name, value in changes.items() if name not in shared}


def train(
    model: str,
    run_dir: str,
    trace: str,
    outcome: str,
    fault: dict[str, Any] | None = None,
    resume: bool = True,
    from_step: int | None = None,
    stop_after: int | None = None,
    subject: str = "grpo",
    blows: Sequence[Mapping[str, Any]] = (),
    struck: str = "",
    python: str = "",
) -> int:
    """One life of the run. Says in the file ``outcome`` how it ended, if it could.

    Returns:
        0 at a good end, 2 after an error of ours, 3 after another.
    """
    from nemorl_commands.console import Console

    arm(Path(run_dir), Fault(**fault) if fault else None, Path(trace))
    sys.executable = python or sys.executable  # of Ray's workers
    callbacks: list[Callback] = [StopAfter(stop_after)] if stop_after else []
    if blows:
        callbacks.append(Strikes([Blow(**blow) for blow in blows], Path(struck)))
    reward = {} if subject in UNREWARDED else {"reward_fn": digits}
    try:
        trainer = nemorl.load_config(settings(model, run_dir, subject)).build()
        quiet = Console(quiet=True)
        trainer.fit(resume=resume, from_step=from_step, callbacks=callbacks, console=quiet, **reward)
    except NemorlError as error:
        said, status = {"type": type(error).__name__, "text": str(error), "fix": error.fix}, 2
    except Exception as error:
        said, status = {"type": type(error).__name__, "text": str(error), "fix": None}, 3
        Path(outcome).write_text(json.dumps(said))
        raise
    else:
        said, status = {}, 0
    Path(outcome).write_text(json.dumps(said))
    return status
