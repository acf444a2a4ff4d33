"""``uniform``: every prompt once per epoch, as without a sampler. What it adds are the statistics."""

from __future__ import annotations

from typing import ClassVar

from nemorl_rl.curriculum.sampler import Draw, PromptSampler


class Uniform(PromptSampler):
    """The order of the epoch: the same prompts as where ``data.sampling`` is unset, and statistics of them.

    Example:
        >>> Uniform().choose(Draw(2, in_order=(4, 0), free=(0, 1, 2), statistics=PromptStatistics(20), seed=1))
        [4, 0]
    """

    summary: ClassVar[str] = "every prompt once per epoch"

    def choose(self, draw: Draw) -> list[int]:
        return list(draw.in_order)
