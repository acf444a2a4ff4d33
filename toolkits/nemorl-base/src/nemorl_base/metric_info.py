"""Declarations of metrics: the title, unit and meaning of a name. The numbers are in :mod:`nemorl_base.metrics`."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from nemorl_base.reading import shown
from nemorl_base.suggest import did_you_mean

THROUGHPUT_NAMES = (
    "performance/tokens_per_sec",
    "performance/generation_tokens_per_sec",
    "performance/training_worker_group_tokens_per_sec",
    "performance/tokens_per_sec_per_gpu",
)
"""Metrics of speed, the one that says most first."""
PREFIXES = ("train/", "validation/", "timing/", "performance/")
TYPO_LIKENESS = 0.85
"""How alike a name must be to a known one to count as a slip of it."""


@dataclass(frozen=True)
class MetricInfo:
    """The title, unit and meaning of a metric, declared by the config class of the part that logs it.

    >>> MetricInfo("Reward", watch_for="0 from the first step on: nothing to learn from").unit
    ''
    """

    title: str = ""
    """Of its chart, which it shares with metrics of the same title and unit. Empty: its name."""
    unit: str = ""
    meaning: str = ""
    """One line."""
    watch_for: str = ""
    """Values that say something is wrong, and what."""
    smooth: bool = False
    """Noisy per step: the chart has a moving average over the faint raw curve."""


def is_called(name: str, declared: str) -> bool:
    """``name`` is the declared one, or of its pattern: in ``train/reward/<part>``, ``<part>`` stands for any text."""
    return name == declared or re.fullmatch(re.sub(r"<\w+>", ".+", re.escape(declared)), name, re.DOTALL) is not None


def metric_problem(name: str, known: Collection[str], *, validates: bool, has_hooks: bool) -> tuple[str, str] | None:
    """Why a run will not log a metric of this name, and what to write; ``None`` where it may.

    Args:
        name: Full name, e.g. ``validation/accuracy``.
        known: Names that the parts of the run declare, patterns among them. They may log others.
        validates: The run validates at some time.
        has_hooks: Plugins are called back, which may log under names of their own.
    """
    if name.startswith("validation/") and not validates:
        return f"{shown(name)} never occurs: this run does not validate", "set validation.every or validation.at_end"
    if any(is_called(name, declared) for declared in known):
        return None
    same_ending = sorted(full for full in known if full.partition("/")[2] == name)
    if not name.startswith(PREFIXES) and not has_hooks:
        guess = f"Did you mean {same_ending[-1]!r}?" if same_ending else did_you_mean(name, known)
        return f"no metric is called {shown(name)}", guess or f"names begin with {', '.join(PREFIXES)}"
    guess = did_you_mean(name, known, likeness=TYPO_LIKENESS)
    return (f"no metric is called {shown(name)}", guess) if guess else None
