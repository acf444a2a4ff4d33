"""What the benchmarks that count tokens until most sums are right share. Import after the thread limit."""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nemorl import Callback, Console
from nemorl.config import load_config
from nemorl.types import Row
from nemorl_tasks.quickstart import recipe

GOAL = 0.9
"""Of the responses to the problems that are validated."""
SETTINGS: Mapping[str, Any] = {
    "records": {"max_gib": 0},
    "validation": {"every": 4, "at_start": True, "num_generations": 2, "temperature": 1.0},
    "checkpoint": {"every": 0, "export": False},
}
"""Of each run."""


def warm_up(folder: Path, rows: Sequence[Row], steps: int) -> None:
    """Write the model that all arms begin with: a tiny one that SFT has shown these rows."""
    with tempfile.TemporaryDirectory() as place:
        base = recipe.write_model(Path(place) / "base")
        _teach(folder, recipe.sft_config(base, Path(place) / "sft", 0), rows, steps)


def teach(folder: Path, model: Path, rows: Sequence[Row], steps: int) -> None:
    """Write what a model becomes when SFT shows it these rows."""
    with tempfile.TemporaryDirectory() as place:
        config = recipe.sft_config(model, Path(place) / "sft", 0)
        del config["policy"]["init"]
        _teach(folder, config, rows, steps)


def _teach(folder: Path, config: dict[str, Any], rows: Sequence[Row], steps: int) -> None:
    del config["data"]
    config |= {"max_steps": steps, "checkpoint": {"every": 0}}
    load_config(config).build().fit(rows, console=Console(quiet=True))
    shutil.copytree(Path(config["run_dir"]) / "model", folder)


class Curve(Callback):
    """The accuracy after so many tokens, which subclasses count; stops the run at the goal, or at the budget's end."""

    essential = True

    def __init__(self, most_tokens: int) -> None:
        self.most_tokens, self.tokens = most_tokens, 0
        self.points: list[tuple[int, int, float]] = []
        """Step, tokens so far, accuracy"""

    def on_validation_end(self, trainer: Any, step: int, metrics: Mapping[str, float]) -> None:
        self.points.append((step, self.tokens, metrics["accuracy"]))
        if metrics["accuracy"] >= GOAL:
            trainer.stop("the goal is reached")
        elif self.tokens >= self.most_tokens:
            trainer.stop("the budget is spent")

    def facts(self) -> dict[str, Any]:
        """Tokens and steps until the goal, None where it was not reached, and the curve."""
        reached = [(step, tokens) for step, tokens, accuracy in self.points if accuracy >= GOAL]
        return {
            "tokens": reached[0][1] if reached else None,
            "steps": reached[0][0] if reached else None,
            "first_accuracy": self.points[0][2],
            "last_accuracy": self.points[-1][2],
            "curve": self.points,
        }


def thousands(tokens: float, digits: int = 0) -> str:
    """In thousands; a dash where the goal was not reached."""
    return "–" if math.isinf(tokens) else f"{tokens / 1000:.{digits}f}k"
