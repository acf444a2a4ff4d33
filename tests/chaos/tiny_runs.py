"""The runs that meet faults: four steps on one layer, with everything that a run leaves in its folder."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import nemorl
import odd_environments  # noqa: F401  registers them
from blows import Blow, Strikes
from faulty_files import Fault, arm
from nemorl.errors import NemorlError
from nemorl_rl.callbacks import Callback
from subjects import HERE, SUBJECTS

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


SAMPLING = {
    "num_prompts_per_step": 2,
    "num_generations_per_prompt": 2,
    "generation": {"max_new_tokens": 4},
}


def settings(model: str, run_dir: str, subject: str, address: str) -> dict[str, Any]:
    told = json.dumps(SUBJECTS[subject].settings).replace("{address}", address).replace("{here}", str(HERE))
    changes = json.loads(told)
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
    return shared | {name: changed(shared.get(name), change) for name, change in changes.items()}


def changed(value: Any, change: Any) -> Any:
    """A part of the settings after a change: what the change does not say stays, unless it names another part."""
    is_added = isinstance(value, dict) and isinstance(change, dict) and "name" not in change
    return {**value, **change} if is_added else change


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
    address: str = "",
    control: str = "",
    imports: Sequence[str] = (),
) -> int:
    """One life of the run. Says in the file ``outcome`` how it ended, if it could.

    Returns:
        0 at a good end, 2 after an error of ours, 3 after another.
    """
    from nemorl_cli.console import Console

    arm(Path(run_dir), Fault(**fault) if fault else None, Path(trace))
    sys.executable = python or sys.executable  # of Ray's workers
    callbacks: list[Callback] = [StopAfter(stop_after)] if stop_after else []
    reward = {"reward_fn": digits} if SUBJECTS[subject].has_reward else {}
    try:
        if blows:
            callbacks.append(Strikes([Blow(**blow) for blow in blows], Path(struck), Path(run_dir), control))
        for name in imports:
            importlib.import_module(name)
        trainer = nemorl.load_config(settings(model, run_dir, subject, address)).build()
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
