"""The run that meets faults: four steps of GRPO on two layers, with everything that a run leaves in its folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import nemorl
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


def settings(model: str, run_dir: str) -> dict[str, Any]:
    return {
        "algorithm": "grpo",
        "model": model,
        "run_dir": run_dir,
        "num_prompts_per_step": 2,
        "num_generations_per_prompt": 2,
        "max_steps": STEPS,
        "generation": {"max_new_tokens": 4},
        "validation": {"every": 2, "max_samples": 2},
        "checkpoint": {"every": 1, "keep_last": 2, "keep_best": 1},
        "policy": {"init": "random", "max_sequence_tokens": 32, "optimizer": {"lr": 1e-3}},
        "data": {"name": "arithmetic", "max_value": 5, "num_train": 16, "num_validation": 2},
        "loggers": [],
    }


def train(
    model: str,
    run_dir: str,
    trace: str,
    outcome: str,
    fault: dict[str, Any] | None = None,
    resume: bool = True,
    from_step: int | None = None,
    stop_after: int | None = None,
) -> int:
    """One life of the run. Says in the file ``outcome`` how it ended, if it could.

    Returns:
        0 at a good end, 2 after an error of ours, 3 after another.
    """
    from nemorl_commands.console import Console

    arm(Path(run_dir), Fault(**fault) if fault else None, Path(trace))
    callbacks = [StopAfter(stop_after)] if stop_after else []
    try:
        trainer = nemorl.load_config(settings(model, run_dir)).build()
        trainer.fit(
            reward_fn=digits, resume=resume, from_step=from_step, callbacks=callbacks, console=Console(quiet=True)
        )
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
