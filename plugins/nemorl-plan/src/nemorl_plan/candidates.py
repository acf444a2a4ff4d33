"""Layouts of a run, judged by memory and time."""

from __future__ import annotations

from dataclasses import dataclass

from nemorl_rl.memory_plan.budgets import Budget, fullest
from nemorl_rl.memory_plan.layouts import Choice, applied, changes, choices, present
from nemorl_rl.memory_plan.scene import Scene

from nemorl_plan.efficiencies import Efficiencies
from nemorl_plan.seconds import StepTime, step_time


@dataclass(frozen=True)
class Candidate:
    """A choice and what becomes of it."""

    choice: Choice
    memory: Budget
    """Of the fullest device, in its fullest phase"""
    time: StepTime
    changes: int
    """How many settings differ from those of the config"""

    @property
    def fits(self) -> bool:
        return self.memory.fits


def judged(scene: Scene, choice: Choice, efficiencies: Efficiencies | None = None) -> Candidate:
    """Memory and time of a choice."""
    chosen = applied(scene, choice)
    return Candidate(choice, fullest(chosen), step_time(chosen, efficiencies), changes(scene, choice))


def candidates(scene: Scene, efficiencies: Efficiencies | None = None) -> list[Candidate]:
    """All layouts of the run: those that fit, the fastest first; then the others, by what they lack."""
    found = [judged(scene, choice, efficiencies) for choice in dict.fromkeys((present(scene), *choices(scene)))]
    return sorted(
        found, key=lambda one: (not one.fits, one.time.seconds if one.fits else -one.memory.free, one.changes)
    )
