"""The conditions of rules over the records of a metric, one value at a time; and when they make an alert."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable
from typing import Literal

from nemorl_rl.alerts.rules import Rule

NOISES = 8.0
"""A mean of a window counts as fallen when it is below its best by more than this many standard errors: the best of
many windows is a lucky one."""
LEAST_FALL = 0.25
"""And by more than this share of its best."""
SUCCESSIVE = 2 / math.sqrt(math.pi)
"""Mean size of the difference of two independent normal values, in standard deviations."""

Condition = Callable[[float], bool]


class Usual:
    """Compares a value with the median of those before it. Values for which it holds are no part of what is usual."""

    def __init__(self, rule: Rule) -> None:
        self._above, self._below = rule.above_usual, rule.below_usual
        self._least = -math.inf if rule.least is None else rule.least
        self._before: deque[float] = deque(maxlen=rule.window)

    def __call__(self, value: float) -> bool:
        if len(self._before) == self._before.maxlen and self._holds(value, statistics.median(self._before)):
            return True
        if math.isfinite(value):
            self._before.append(value)
        return False

    def _holds(self, value: float, usual: float) -> bool:
        if usual <= 0:
            return False  # there is no multiple of nothing
        if self._above is not None:
            return value > max(self._above * usual, self._least)
        return value < (self._below or 0.0) * usual


class Collapse:
    """Compares the mean of the newest values with the best such mean.

    Noise is told from successive differences: for independent normal values their mean size is 2/sqrt(pi) = 1.128
    standard deviations, and a trend or a single jump hardly adds to it.
    """

    def __init__(self, rule: Rule) -> None:
        self._share = rule.collapses or 0.0
        self._newest: deque[float] = deque(maxlen=rule.window)
        self._best, self._lowest = -math.inf, math.inf
        self._differences, self._count = 0.0, 0

    def __call__(self, value: float) -> bool:
        if not math.isfinite(value):
            return False
        if self._newest:
            self._differences += abs(value - self._newest[-1])
            self._count += 1
        self._newest.append(value)
        if len(self._newest) < (self._newest.maxlen or 0):
            return False
        mean = statistics.fmean(self._newest)
        self._best, self._lowest = max(self._best, mean), min(self._lowest, mean)
        noise = self._differences / self._count / SUCCESSIVE / math.sqrt(len(self._newest))
        fall = self._best - mean
        least = max(self._share * (self._best - self._lowest), LEAST_FALL * abs(self._best), NOISES * noise)
        return fall > least


def condition_of(rule: Rule) -> Condition:
    """Takes the values of a metric, in order, and says of each whether the rule holds."""
    match rule.conditions:
        case ["above"]:
            return lambda value: not value <= (rule.above or 0.0)  # NaN is past every limit
        case ["at_least"]:
            return lambda value: value >= (rule.at_least or 0.0)
        case ["below"]:
            return lambda value: value < (rule.below or 0.0)
        case ["above_usual"] | ["below_usual"]:
            return Usual(rule)
        case ["collapses"]:
            return Collapse(rule)
        case _:
            return lambda value: not math.isfinite(value)


class Watch:
    """One rule over one metric. An alert is raised once, and again only after it was over."""

    def __init__(self, rule: Rule) -> None:
        self._holds, self._patience = condition_of(rule), 1 if rule.at_start else rule.patience
        self._left = 1 if rule.at_start else math.inf
        """Values that are still judged."""
        self._in_a_row = 0
        """Values in a row that speak for a change of ``is_active``."""
        self.is_active = False

    def take(self, value: float) -> Literal["raised", "over"] | None:
        """The change that the next value makes."""
        if not self._left:
            return None
        self._left -= 1
        differs = self._holds(value) != self.is_active
        self._in_a_row = self._in_a_row + 1 if differs else 0
        if self._in_a_row < self._patience:
            return None
        self.is_active, self._in_a_row = not self.is_active, 0
        return "raised" if self.is_active else "over"
