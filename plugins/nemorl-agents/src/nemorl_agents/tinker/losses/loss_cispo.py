"""``cispo``: the clipped ratio is a weight, so that every token keeps a gradient.

# N = tokens of all sequences concatenated
"""

from __future__ import annotations

from dataclasses import dataclass

from nemorl_tensors import TokenBatch
from torch import Tensor

from nemorl_agents.tinker.losses.client_loss import Fields
from nemorl_agents.tinker.losses.ratio_loss import ClippedRatioLoss


@dataclass(frozen=True)
class CISPOLoss(ClippedRatioLoss):
    """loss = -sum(sg(clip(r, clip_low_threshold, clip_high_threshold)) * p * A)     arXiv:2506.13585, eq. 4 and 5

    sg: without gradient. By default there is no lower bound, as in arXiv:2510.13786.
    """

    clip_low_threshold: float = 0.0
    clip_high_threshold: float = 4.0

    def log_ratio(self, log_ratio: Tensor, fields: Fields, batch: TokenBatch) -> Tensor:
        return log_ratio.detach()

    def objective(self, ratio: Tensor, clipped_ratio: Tensor, logprobs: Tensor, advantages: Tensor) -> Tensor:
        return clipped_ratio * logprobs * advantages
