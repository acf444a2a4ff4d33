"""Layouts of a run, judged by memory and time."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace

from nemorl_rl.planning.memory.budgets import Budget, fullest
from nemorl_rl.planning.memory.layouts import MODE, Choice, applied, changes, choices, keeps_learning, present
from nemorl_rl.planning.memory.scene import Scene

from nemorl_insight.plan.efficiencies import Efficiencies
from nemorl_insight.plan.seconds import StepTime, step_time


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


TIE_FRAC = 0.05
"""Seconds that differ by less are equal: a plan does not know them better."""
SIZES = frozenset({"microbatch_tokens", "activation_checkpointing", "gpu_memory_utilization", "kv_cache_gib"})
"""Settings that are no layout: of several layouts that differ in them alone, lists show the best."""


def candidates(
    scene: Scene, efficiencies: Efficiencies | None = None, *, allowed: Collection[str] = ()
) -> list[Candidate]:
    """All layouts of the run: those that fit, the fastest first, of equally fast ones that with the fewest changes;
    then the others, by what they lack. In each part those that change what is learnt come last, unless allowed."""
    found = [judged(scene, choice, efficiencies) for choice in dict.fromkeys((present(scene), *choices(scene)))]
    fastest = min((one.time.seconds for one in found if one.fits), default=1.0)

    def place(one: Candidate) -> tuple[bool, bool, float, float]:
        learns_otherwise = MODE not in allowed and not keeps_learning(scene, one.choice)
        if not one.fits:
            return True, learns_otherwise, -one.memory.free, one.changes
        slower = math.log(max(1.0, one.time.seconds / fastest))
        return False, learns_otherwise, slower // math.log1p(TIE_FRAC), one.changes

    return sorted(found, key=lambda one: (*place(one), one.time.seconds))


def distinct(ranked: Iterable[Candidate]) -> Iterator[Candidate]:
    """The first of each layout, whatever its sizes."""
    seen = set()
    for one in ranked:
        settings = frozenset((*one.choice.training, *one.choice.sampling))
        layout = replace(one.choice, training=(), sampling=(), turns=None)
        key = (one.fits, layout, frozenset(setting for setting in settings if setting[0] not in SIZES))
        if key not in seen:
            seen.add(key)
            yield one
