"""The hook. A run that lists it in ``plugins.hooks`` builds one and calls its ``on_*`` methods."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from nemorl import BaseTrainer
from nemorl.types import Samples


class ExampleHook:
    """Stops a run when all responses to each prompt earn the same, step after step: comparing them teaches nothing.

    Methods take any of the arguments of their event, by name. One that raises is reported and disabled; with a class
    attribute ``essential = True`` it ends the run instead.
    """

    def __init__(self, patience_steps: int) -> None:
        self.patience_steps = patience_steps
        self.idle_steps = 0
        """Steps in a row that taught nothing."""

    def on_rollout_end(self, trainer: BaseTrainer[Any], samples: Samples) -> None:
        self.idle_steps = 0 if teaches(samples) else self.idle_steps + 1
        if self.idle_steps >= self.patience_steps:
            trainer.stop(f"{self.idle_steps} steps in a row without a difference in rewards")


def teaches(samples: Samples) -> bool:
    """Whether some prompt has responses of different rewards."""
    rewards: dict[int, set[float]] = defaultdict(set)
    for sample in samples:
        rewards[sample.prompt.index].add(sample.reward)
    return any(len(found) > 1 for found in rewards.values())
