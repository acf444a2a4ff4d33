"""Metrics of variants, and whether they differ by more than chance.

Each run gives one value of a metric: its mean over the last steps. Where a variant has several runs, these are its
sample, and its noise is that of seeds. Where it has one, the steps are: a smaller noise than that of seeds, since steps
of one run are alike, which the verdict says.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from nemorl_report.comparing.variants import Variant

LAST_FRAC, MIN_LAST, MAX_LAST = 0.1, 5, 20
"""Share of a training metric's values that its mean is taken over; at least and at most how many. Of a validation
metric it is the last one."""
T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
"""Student's t, quantile 0.975, by degrees of freedom from 1 on."""
Z_975 = 1.959964
"""Of the normal distribution: Student's t with infinitely many degrees of freedom."""


@dataclass(frozen=True)
class Estimate:
    """A metric of a variant."""

    mean: float
    error: float | None
    """Standard error of the mean; ``None`` where there is one value."""
    count: int
    """Values that it is the mean of: runs, or steps of the only run."""
    of_seeds: bool

    @classmethod
    def of(cls, variant: Variant, metric: str) -> Estimate | None:
        """``None`` where no run has the metric."""
        series = [list(run.metrics[metric].values()) for run in variant.runs if run.metrics.get(metric)]
        if not series:
            return None
        of_seeds = len(series) > 1
        values = [statistics.fmean(_last(one, metric)) for one in series] if of_seeds else _last(series[0], metric)
        error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
        return cls(statistics.fmean(values), error, len(values), of_seeds)


@dataclass(frozen=True)
class Contrast:
    """A metric of two variants."""

    metric: str
    first: Estimate
    second: Estimate

    @property
    def difference(self) -> float:
        return self.second.mean - self.first.mean

    @property
    def margin(self) -> float | None:
        """Half of the 95% interval of the difference (Welch); ``None`` where a side has one value."""
        errors = [(side.error, side.count) for side in (self.first, self.second)]
        if any(error is None for error, _ in errors):
            return None
        parts = [(error**2, count) for error, count in errors if error is not None]
        total = sum(part for part, _ in parts)
        if total == 0:
            return 0.0
        # Welch and Satterthwaite's degrees of freedom
        degrees = total**2 / sum(part**2 / (count - 1) for part, count in parts)
        return math.sqrt(total) * _quantile(degrees)

    @property
    def verdict(self) -> str:
        """``same``, ``noise``, ``differs``, ``differs (one seed)`` (of steps alone), or ``unknown``."""
        if self.difference == 0:
            return "same"
        if self.margin is None:
            return "unknown"
        if abs(self.difference) <= self.margin:
            return "noise"
        return "differs" if self.first.of_seeds and self.second.of_seeds else "differs (one seed)"


def _quantile(degrees: float) -> float:
    """Student's t at 0.975: between whole degrees of freedom on a straight line, and beyond the table by three terms of
    its expansion (Abramowitz and Stegun, 26.7.5), which are within 0.001 of it there."""
    whole = max(int(degrees), 1)
    if whole >= len(T_975):
        second, third = (Z_975**3 + Z_975) / 4, (5 * Z_975**5 + 16 * Z_975**3 + 3 * Z_975) / 96
        return Z_975 + second / degrees + third / degrees**2
    return T_975[whole - 1] + (max(degrees, 1.0) - whole) * (T_975[whole] - T_975[whole - 1])


def contrasts(first: Variant, second: Variant, metrics: Sequence[str]) -> Iterator[Contrast]:
    """Of the metrics that both have."""
    for metric in metrics:
        one, other = Estimate.of(first, metric), Estimate.of(second, metric)
        if one is not None and other is not None:
            yield Contrast(metric, one, other)


def metric_names(variants: Sequence[Variant]) -> list[str]:
    """All metrics of variants but those of the clock and the machine, results first."""
    names = {name for variant in variants for run in variant.runs for name in run.metrics}
    results = ("validation/accuracy", "validation/reward", "validation/val_loss", "train/reward", "train/accuracy")
    kept = sorted(name for name in names if not name.startswith(("timing/", "system/", "performance/", "efficiency/")))
    return [*(name for name in results if name in names), *(name for name in kept if name not in results)]


def _last(values: Sequence[float], metric: str) -> list[float]:
    count = min(MAX_LAST, max(MIN_LAST, math.ceil(LAST_FRAC * len(values))))
    return list(values[-1 if metric.startswith("validation/") else -count :])
