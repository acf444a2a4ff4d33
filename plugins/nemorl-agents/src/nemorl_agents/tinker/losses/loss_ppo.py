"""``ppo``: the clipped surrogate of PPO, with the ratio to the sampler.

# N = tokens of all sequences concatenated
"""

from __future__ import annotations

from dataclasses import dataclass

from nemorl_tensors import TokenBatch
from torch import Tensor

from nemorl_agents.tinker.losses.client_loss import Fields
from nemorl_agents.tinker.losses.ratio_loss import ClippedRatioLoss


@dataclass(frozen=True)
class PPOClipLoss(ClippedRatioLoss):
    """loss = -sum(min(r * A, clip(r, clip_low_threshold, clip_high_threshold) * A))      arXiv:1707.06347, eq. 7

    Differs from the paper: the old policy is the sampler, and the bounds are ratios.
    """

    clip_low_threshold: float = 0.8
    clip_high_threshold: float = 1.2

    def log_ratio(self, log_ratio: Tensor, fields: Fields, batch: TokenBatch) -> Tensor:
        return log_ratio
