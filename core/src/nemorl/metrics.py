"""Metrics that know how they reduce, so that microbatches, ranks and minibatches merge exactly.

A mean of means is wrong whenever the counts differ: means of 1.0 over 9 tokens and 0.0 over 1 token are 0.9
together, not 0.5. Whatever crosses a boundary is therefore a (total, count) pair until it is logged.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar

from nemorl.base.text.reading import shown
from nemorl.base.text.suggest import did_you_mean


def _total(items: list[float]) -> float:
    try:
        return math.fsum(items)
    except (ValueError, OverflowError):  # infinities of both signs, whose sum is NaN; or more than a float holds
        return float(sum(items))


@dataclass(frozen=True, slots=True)
class Mean:
    """``total / count``; 0 when nothing was counted.

    >>> Mean.of([1.0, 2.0]).merge(Mean.of([9.0])).value
    4.0
    """

    total: float
    count: float = 1.0

    @classmethod
    def of(cls, values: Iterable[float]) -> Mean:
        items = list(values)
        return cls(_total(items), len(items))

    @property
    def value(self) -> float:
        return self.total / self.count if self.count else 0.0

    def merge(self, other: Mean) -> Mean:
        return Mean(self.total + other.total, self.count + other.count)


@dataclass(frozen=True, slots=True)
class Sum:
    """Adds up: counts, seconds, and losses whose weights are already normalised.

    >>> Sum(1.5).merge(Sum(2.0)).value
    3.5
    """

    value: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Sum:
        return cls(_total(list(values)))

    def merge(self, other: Sum) -> Sum:
        return Sum(self.value + other.value)


def _nan_first(extreme: float, *values: float) -> float:
    """NaN where there is one: Python's ``min`` and ``max`` find it or not by the order of the values."""
    return math.nan if any(map(math.isnan, values)) else extreme


@dataclass(frozen=True, slots=True)
class Min:
    """The smallest value, NaN if one is; ``inf``, which is not logged, when there is none.

    >>> Min.of([3.0, 1.0]).merge(Min(2.0)).value
    1.0
    """

    value: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Min:
        found = list(values)
        return cls(_nan_first(min(found, default=math.inf), *found))

    def merge(self, other: Min) -> Min:
        return Min(_nan_first(min(self.value, other.value), self.value, other.value))


@dataclass(frozen=True, slots=True)
class Max:
    """The largest value, NaN if one is; ``-inf``, which is not logged, when there is none.

    >>> Max.of([3.0, 1.0]).merge(Max(2.0)).value
    3.0
    """

    value: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Max:
        found = list(values)
        return cls(_nan_first(max(found, default=-math.inf), *found))

    def merge(self, other: Max) -> Max:
        return Max(_nan_first(max(self.value, other.value), self.value, other.value))


@dataclass(frozen=True, slots=True)
class Last:
    """The most recent value: learning rate, version numbers. Equal on every rank.

    >>> Last(0.5).merge(Last(0.25)).value
    0.25
    """

    value: float

    def merge(self, other: Last) -> Last:
        return other


@dataclass(frozen=True, slots=True)
class Histogram:
    """Counts of non-negative values in a fixed row of cells, from which quantiles of several parts merge exactly.

    Cell 0 counts values below ``LOWEST``, zero among them; the last one values of ``HIGHEST`` and more. Between them,
    each power of ten is cut into ``CELLS_PER_DECADE`` cells of equal ratio. A quantile is reported as the lower end of
    its cell: understated by 11 % at most, hence never above the maximum.

    >>> Histogram.of([0.0, 0.0, 5.0]).quantile(0.5)
    0.0
    """

    LOWEST: ClassVar[float] = 1e-8
    HIGHEST: ClassVar[float] = 1e2
    CELLS_PER_DECADE: ClassVar[int] = 20
    CELLS: ClassVar[int] = CELLS_PER_DECADE * 10 + 2
    QUANTILES: ClassVar[tuple[float, ...]] = (0.5, 0.99, 0.999)
    """The quantiles that are logged, as ``<name>/p50``, ``<name>/p99`` and ``<name>/p999``."""

    counts: tuple[int, ...]
    """[CELLS]"""

    @classmethod
    def of(cls, values: Iterable[float]) -> Histogram:
        counts = [0] * cls.CELLS
        for value in values:
            counts[cls.cell_of(value)] += 1
        return cls(tuple(counts))

    @classmethod
    def cell_of(cls, value: float) -> int:
        """Index of the cell that counts ``value``; what is not a number counts as too large to tell."""
        if value < cls.LOWEST:
            return 0
        if not value < cls.HIGHEST:
            return cls.CELLS - 1
        return 1 + math.floor(math.log10(value / cls.LOWEST) * cls.CELLS_PER_DECADE)

    @classmethod
    def lower_end(cls, cell: int) -> float:
        """The smallest value that ``cell`` counts."""
        return 0.0 if cell == 0 else float(cls.LOWEST * 10 ** ((cell - 1) / cls.CELLS_PER_DECADE))

    @property
    def count(self) -> int:
        """Values seen."""
        return sum(self.counts)

    @property
    def value(self) -> float:
        """The median."""
        return self.quantile(0.5)

    def quantile(self, q: float) -> float:
        """The smallest value that at least a share ``q`` of all values does not exceed; NaN when nothing was seen."""
        wanted, seen = max(1, math.ceil(q * self.count)), 0
        for cell, count in enumerate(self.counts):
            seen += count
            if seen >= wanted:
                return self.lower_end(cell)
        return math.nan

    def merge(self, other: Histogram) -> Histogram:
        return Histogram(tuple(mine + theirs for mine, theirs in zip(self.counts, other.counts, strict=True)))


Metric = Mean | Sum | Min | Max | Last | Histogram
"""One of the ways to reduce.

>>> metric: Metric = Mean(3.0, 2)
"""
Metrics = Mapping[str, Metric]
"""Names follow the reference system's (``loss``, ``reward``, ``probs_ratio_max``, …), so dashboards carry over.

>>> metrics: Metrics = {"loss": Sum(0.25), "reward": Mean(3.0, 2)}
"""


def merge(parts: Sequence[Metrics]) -> dict[str, Metric]:
    """Combine metrics of several microbatches, ranks or minibatches, each by its own reduction.

    >>> merge([{"loss": Sum(1.0)}, {"loss": Sum(2.0)}])["loss"].value
    3.0
    """
    merged: dict[str, Metric] = {}
    for part in parts:
        for name, metric in part.items():
            merged[name] = merged[name].merge(metric) if name in merged else metric  # type: ignore[arg-type]
    return merged


def average(parts: Sequence[Metrics]) -> dict[str, Metric]:
    """Combine optimizer steps of one batch: as :func:`merge`, but a ``Sum`` becomes the mean over the steps.

    ``loss`` and ``grad_norm`` are sums within an optimizer step and are reported per step.

    >>> average([{"loss": Sum(1.0)}, {"loss": Sum(2.0)}])["loss"].value
    1.5
    """
    as_means = [{name: Mean(m.value) if isinstance(m, Sum) else m for name, m in part.items()} for part in parts]
    return merge(as_means)


def values(metrics: Metrics, prefix: str = "") -> dict[str, float]:
    """Plain numbers for loggers; extremes and quantiles of nothing are dropped.

    >>> values({"reward": Mean(3.0, 2)}, prefix="train/")
    {'train/reward': 1.5}
    """
    return {
        f"{prefix}{label}": value
        for name, metric in metrics.items()
        for label, value in _numbers(name, metric)
        if math.isfinite(value) or isinstance(metric, (Mean, Sum, Last))
    }


def as_numbers(record: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a record, as Python's own: hooks may add scalars of any library, or what is no number.

    >>> as_numbers({"loss": 1, "note": None})
    {'loss': 1.0}
    """
    found = {}
    for name, value in record.items():
        with suppress(TypeError, ValueError, OverflowError, RuntimeError):  # the last one by tensors of several numbers
            found[name] = float(value)
    return found


def _numbers(name: str, metric: Metric) -> Iterator[tuple[str, float]]:
    if isinstance(metric, Histogram):
        for q in metric.QUANTILES:
            yield f"{name}/p{f'{q:g}'.removeprefix('0.').ljust(2, '0')}", metric.quantile(q)
    else:
        yield name, metric.value


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
