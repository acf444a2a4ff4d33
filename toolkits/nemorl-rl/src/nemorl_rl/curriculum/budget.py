"""``budget``: prompts by how much they are expected to teach for what they cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from pydantic import Field

from nemorl_rl.curriculum.sampler import Draw, PosteriorSampler, expected_variance, weighted_keys
from nemorl_rl.curriculum.statistics import PromptStatistics


class Budget(PosteriorSampler):
    """Draws prompts with weights E[p (1 - p)] / (tokens that an attempt at them is expected to take).

    A group of G responses whose reward is 1 with probability p has an expected sum of squared advantages (without
    division by the standard deviation) of (G - 1) p (1 - p), and costs G attempts: the weight is signal per token but
    for a factor that all prompts share. Where a token takes the same time in every prompt, this is signal per second.

    Example:
        >>> statistics = PromptStatistics(20)
        >>> for row, tokens in enumerate((100, 300)):
        ...     statistics.add(row, Outcome(attempts=4, passes=2, rewards=2.0, tokens=4 * tokens), step=1)
        >>> Budget(prior_attempts=4).attempt_tokens(statistics, 0)  # (4 * 200 of all prompts + 400) / (4 + 4)
        150.0
    """

    summary: ClassVar[str] = "by the expected variance of the reward per token"

    prior_attempts: float = Field(4.0, gt=0)
    """Attempts for which the mean of all prompts stands in a prompt's expected tokens. Raise it where lengths vary much
    from one response to the next."""
    fixed_tokens: float = Field(0.0, ge=0)
    """Cost of an attempt besides its tokens, in tokens: raise it where environments take long to start."""

    def attempt_tokens(self, statistics: PromptStatistics, row: int) -> float:
        """Tokens that an attempt at a row is expected to take."""
        record, known, mean = statistics.get(row), self.prior_attempts, statistics.mean_tokens
        if record is None:
            return mean
        return (known * mean + record.tokens) / (known + record.attempts)

    def weights(self, draw: Draw) -> list[float]:
        """Of the rows of ``draw.free``."""
        statistics = draw.statistics
        return [
            expected_variance(*self.posterior(statistics, row))
            / (self.fixed_tokens + self.attempt_tokens(statistics, row))
            for row in draw.free
        ]

    def scores(self, draw: Draw) -> Sequence[float]:
        return weighted_keys(self.weights(draw), draw.seed)
