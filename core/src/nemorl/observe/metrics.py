"""Metrics that know how they reduce, so that microbatches, ranks and minibatches merge exactly.

A mean of means is wrong whenever the counts differ: means of 1.0 over 9 tokens and 0.0 over 1 token are 0.9
together, not 0.5. Whatever crosses a boundary is therefore a (total, count) pair until it is logged.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mean:
    """``total / count``; 0 when nothing was counted."""

    total: float
    count: float = 1.0

    @classmethod
    def of(cls, values: Iterable[float]) -> Mean:
        items = list(values)
        return cls(math.fsum(items), len(items))

    @property
    def value(self) -> float:
        return self.total / self.count if self.count else 0.0

    def merge(self, other: Mean) -> Mean:
        return Mean(self.total + other.total, self.count + other.count)


@dataclass(frozen=True, slots=True)
class Sum:
    """Adds up: counts, seconds, and losses whose weights are already normalised."""

    value: float

    def merge(self, other: Sum) -> Sum:
        return Sum(self.value + other.value)


@dataclass(frozen=True, slots=True)
class Min:
    value: float

    def merge(self, other: Min) -> Min:
        return Min(min(self.value, other.value))


@dataclass(frozen=True, slots=True)
class Max:
    value: float

    def merge(self, other: Max) -> Max:
        return Max(max(self.value, other.value))


@dataclass(frozen=True, slots=True)
class Last:
    """The most recent value: learning rate, version numbers. Equal on every rank."""

    value: float

    def merge(self, other: Last) -> Last:
        return other


Metric = Mean | Sum | Min | Max | Last
Metrics = Mapping[str, Metric]
"""Names follow the reference system's (``loss``, ``reward``, ``probs_ratio_max``, …), so dashboards carry over."""


def merge(parts: Sequence[Metrics]) -> dict[str, Metric]:
    """Combine metrics of several microbatches, ranks or minibatches, each by its own reduction."""
    merged: dict[str, Metric] = {}
    for part in parts:
        for name, metric in part.items():
            merged[name] = merged[name].merge(metric) if name in merged else metric  # type: ignore[arg-type]
    return merged


def average(parts: Sequence[Metrics]) -> dict[str, Metric]:
    """Combine optimizer steps of one batch: as :func:`merge`, but a ``Sum`` becomes the mean over the steps.

    ``loss`` and ``grad_norm`` are sums within an optimizer step and are reported per step.
    """
    as_means = [{name: Mean(m.value) if isinstance(m, Sum) else m for name, m in part.items()} for part in parts]
    return merge(as_means)


def values(metrics: Metrics, prefix: str = "") -> dict[str, float]:
    """Plain numbers for loggers; unbounded minima and maxima (nothing was seen) are dropped."""
    return {
        f"{prefix}{name}": m.value
        for name, m in metrics.items()
        if math.isfinite(m.value) or isinstance(m, (Mean, Sum, Last))
    }
