"""PromptSampler: the base of what chooses the prompts of a rollout. A sampler is its config: it keeps no state.

All that a choice depends on is in the ``Draw``, so that it is the same after a restart. An installed package adds one
by an entry point in the group ``nemorl.slots``: ``"prompt_sampler.mine" = "my_package.mine:Mine"``.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from nemorl.config.base import Config
from pydantic import Field

if TYPE_CHECKING:
    from nemorl_rl.curriculum.statistics import PromptStatistics

HALF_LIFE_STEPS = 20.0
"""Training steps after which an attempt counts half, unless a sampler says otherwise."""


@dataclass(frozen=True)
class Draw:
    """What a sampler chooses from.

    Example:
        >>> Draw(2, in_order=(4, 0), free=(0, 2, 4), statistics=PromptStatistics(20), seed=1).count
        2
    """

    count: int
    """Rows wanted."""
    in_order: Sequence[int]
    """The rows that come next in the order of the epoch, as many as are wanted."""
    free: Sequence[int]
    """The rows that may be chosen: those whose responses are not on their way. All, where these would be too few."""
    statistics: PromptStatistics
    seed: int
    """Another one for each draw."""


class PromptSampler(Config):
    """Base of prompt samplers. A subclass defines ``scores``, or ``choose`` itself.

    Example:
        >>> class Shortest(PromptSampler):
        ...     def scores(self, draw):
        ...         records = [draw.statistics.get(row) for row in draw.free]
        ...         return [-1.0 if record is None else -record.tokens / record.attempts for record in records]
        >>> statistics = PromptStatistics(20)
        >>> statistics.add(0, Outcome(attempts=1, passes=1, rewards=1.0, tokens=9), step=1)
        >>> Shortest().choose(Draw(2, (0, 1), (0, 1, 2), statistics, seed=1))
        [1, 2]
    """

    summary: ClassVar[str] = ""
    """One line."""

    @property
    def half_life(self) -> float:
        """Training steps after which an attempt counts half."""
        return HALF_LIFE_STEPS

    def scores(self, draw: Draw) -> Sequence[float]:
        """One number per row of ``draw.free``; those with the largest are asked."""
        raise NotImplementedError(f"{type(self).__name__} must define scores() or choose()")

    def choose(self, draw: Draw) -> list[int]:
        """``draw.count`` rows. One comes twice only where there are fewer."""
        rounds, rest = divmod(draw.count, len(draw.free))
        chosen = [*draw.free] * rounds
        if rest:
            ranked = zip(self.scores(draw), range(len(draw.free)), strict=True)
            places = heapq.nlargest(rest, ranked, key=lambda pair: (pair[0], -pair[1]))
            chosen += [draw.free[place] for _, place in places]
        return chosen


class PosteriorSampler(PromptSampler):
    """A sampler that knows each prompt's pass rate by a Beta distribution.

    p ~ Beta(prior_passes + passes, prior_failures + failures), counts faded by ``half_life_steps``. A prompt that was
    never asked has the prior, and one that was not asked for long comes near to it again: so both are tried.
    """

    prior_passes: float = Field(1.0, gt=0, le=1000)
    """Passes that a prompt is credited with before it was asked. 1 and 1: all rates are as likely. Raise this where
    most prompts are easy."""
    prior_failures: float = Field(1.0, gt=0, le=1000)
    """Failures that it is credited with. Raise it where most prompts are hard."""
    half_life_steps: float = Field(HALF_LIFE_STEPS, gt=0)
    """Training steps after which an attempt counts half, as the policy has changed since. Lower it where the policy
    learns fast: solved and hopeless prompts are looked at again sooner."""

    @property
    def half_life(self) -> float:
        return self.half_life_steps

    def posterior(self, statistics: PromptStatistics, row: int) -> tuple[float, float]:
        """The two parameters of a row's Beta distribution."""
        passes, failures = statistics.evidence(row)
        return self.prior_passes + passes, self.prior_failures + failures


def expected_variance(a: float, b: float) -> float:
    """E[p (1 - p)] for p ~ Beta(a, b): the expected variance of a reward that is 1 with probability p, else 0.

    Example:
        >>> expected_variance(1, 1)  # 1 / (2 * 3)
        0.16666666666666666
    """
    return a * b / ((a + b) * (a + b + 1))


def weighted_keys(weights: Sequence[float], seed: int) -> list[float]:
    """Keys whose largest are a weighted sample without replacement: log(u) / weight (Efraimidis and Spirakis, 2006,
    https://doi.org/10.1016/j.ipl.2005.11.003).

    Args:
        weights: None negative; a weight of 0 comes last.
        seed: Of u.
    """
    dice = random.Random(seed)
    return [
        math.log(1.0 - u) / weight if weight > 0 else -math.inf
        for weight, u in ((weight, dice.random()) for weight in weights)
    ]
