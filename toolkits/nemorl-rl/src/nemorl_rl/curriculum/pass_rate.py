"""``pass_rate``: prompts by how much their rewards are expected to differ within a group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from nemorl_rl.curriculum.sampler import Draw, PosteriorSampler, expected_variance, weighted_keys


class PassRate(PosteriorSampler):
    """Draws prompts with weights E[p (1 - p)], where p is the pass rate.

    p (1 - p) is the variance of the reward, called the learnability of a prompt (arXiv:2502.12272); the improvement
    that a step can be expected to bring is bounded from below by it (arXiv:2504.03380).
    Differs from the papers: the expectation is over a faded posterior of the run's own rollouts; neither extra rollouts
    nor a buffer of candidates are needed to know p.

    Example:
        >>> statistics = PromptStatistics(20)
        >>> statistics.add(0, Outcome(attempts=8, passes=4, rewards=4.0, tokens=80), step=1)
        >>> draw = Draw(1, (0,), (0, 1), statistics, seed=1)
        >>> PassRate(prior_passes=1, prior_failures=1).weights(draw)  # 5 * 5 / (10 * 11), and 1 / (2 * 3)
        [0.22727272727272727, 0.16666666666666666]
    """

    summary: ClassVar[str] = "by the expected variance of the reward, p (1 - p)"

    def weights(self, draw: Draw) -> list[float]:
        """Of the rows of ``draw.free``."""
        return [expected_variance(*self.posterior(draw.statistics, row)) for row in draw.free]

    def scores(self, draw: Draw) -> Sequence[float]:
        return weighted_keys(self.weights(draw), draw.seed)
