"""``thompson``: prompts whose sampled pass rate is near a target."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import ClassVar

from pydantic import Field

from nemorl_rl.curriculum.sampler import Draw, PosteriorSampler


class Thompson(PosteriorSampler):
    """Samples a pass rate from each prompt's posterior and takes the prompts that come closest to ``target``.

    Thompson sampling over prompts, as in MoPPS (arXiv:2507.04632), with the discounting of arXiv:1707.09727.
    Differs from MoPPS: all prompts are candidates, not a multiple of the batch drawn at random, and evidence fades by
    training steps, not by visits.

    Example:
        >>> statistics = PromptStatistics(20)
        >>> for row, passes in enumerate((0, 400, 800)):
        ...     statistics.add(row, Outcome(attempts=800, passes=passes, rewards=0.0, tokens=80), step=1)
        >>> Thompson().choose(Draw(1, (0,), (0, 1, 2), statistics, seed=1))
        [1]
    """

    summary: ClassVar[str] = "by a sampled pass rate that is near a target"

    target: float = Field(0.5, gt=0, lt=1)
    """Pass rate to look for. 0.5 has the largest variance of rewards; a lower one prefers hard prompts."""

    def scores(self, draw: Draw) -> Sequence[float]:
        dice = random.Random(draw.seed)
        rates = (dice.betavariate(*self.posterior(draw.statistics, row)) for row in draw.free)
        return [-abs(rate - self.target) for rate in rates]
