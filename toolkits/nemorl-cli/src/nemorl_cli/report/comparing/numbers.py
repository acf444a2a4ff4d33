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
from functools import cache

from nemorl_cli.report.comparing.variants import Variant

LAST_FRAC, MIN_LAST, MAX_LAST = 0.1, 5, 20
"""Share of a training metric's values that its mean is taken over; at least and at most how many. Of a validation
metric it is the last one."""
LARGEST_T = 12.7062047362
"""Student's t at 0.975 with one degree of freedom: tan(0.475 pi)."""
PIECES = 32
"""Of the range over which the density is integrated, by Simpson's rule: within 4e-5 of the quantile, relative."""


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


@cache
def _quantile(degrees: float) -> float:
    """Student's t at 0.975, for any number of degrees of freedom from 1 on, by bisection."""
    degrees = max(degrees, 1.0)
    low, high = 0.0, LARGEST_T
    while high - low > 1e-7:
        middle = (low + high) / 2
        low, high = (middle, high) if _between_zero_and(middle, degrees) < 0.475 else (low, middle)
    return high


def _between_zero_and(t: float, degrees: float) -> float:
    """The probability of values from 0 to ``t`` of Student's distribution with v degrees of freedom.

    With t = sqrt(v) tan(a), its density becomes c cos(a)^(v - 1), c = Gamma((v + 1) / 2) / (sqrt(pi) Gamma(v / 2)):
    smooth and without tails (Abramowitz and Stegun, 26.7.3 and 26.7.4, for whole v).
    """
    step = math.atan(t / math.sqrt(degrees)) / PIECES
    weights = [1, *([4, 2] * (PIECES // 2))[:-1], 1]
    total = math.fsum(weight * math.pow(math.cos(place * step), degrees - 1) for place, weight in enumerate(weights))
    constant = math.exp(math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2)) / math.sqrt(math.pi)
    return constant * total * step / 3


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
