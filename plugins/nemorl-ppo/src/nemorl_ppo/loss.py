"""The loss of the policy.

# N = tokens of all sequences concatenated
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from nemorl.metrics import Metrics, Sum
from nemorl_rl.policy_gradient.loss import ClippedPolicyGradientLoss
from nemorl_tensors import TokenBatch, segment_sum
from torch import Tensor


@dataclass(frozen=True)
class PPOLoss(ClippedPolicyGradientLoss):
    """PPO's clipped surrogate, per token, with a KL term and an imitation term where their weights are not 0.

    ratio = exp(policy_logprobs - old_logprobs)
    surrogate = min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A)                 arXiv:1707.06347, eq. 7
    loss = sum(loss_weights * (-w * surrogate + kl_penalty * KL(policy || reference)))
           - positive_nll_weight * sum(positive_weights * policy_logprobs)                  arXiv:2504.05118, 4.3

    Differs from the paper: no entropy bonus and no value term, since the critic is another model with a loss of its
    own; ``dual_clip`` bounds negative advantages (arXiv:1912.09729); w is 1 unless there is a ``correction``.
    """

    positive_nll_weight: float = 0.0

    @property
    def requires(self) -> frozenset[str]:
        return super().requires | ({"positive_weights"} if self.positive_nll_weight > 0 else set())

    def __call__(self, policy_logprobs: Tensor, batch: TokenBatch) -> tuple[Tensor, Metrics]:
        loss, metrics = super().__call__(policy_logprobs, batch)
        if self.positive_nll_weight > 0:
            weights = torch.where(batch.mask, batch["positive_weights"], 0.0)
            nll = -(torch.where(batch.mask, policy_logprobs, 0.0) * weights).sum()
            loss = loss + self.positive_nll_weight * nll
            metrics = {**metrics, "positive_nll_loss": Sum(float(nll.detach()))}
        return loss, metrics

    def has_gradient(self, batch: TokenBatch) -> Tensor:
        found = self.has_advantage(batch)
        if self.positive_nll_weight > 0:
            is_imitated = (batch["positive_weights"] != 0).float()
            found = found | (segment_sum(is_imitated, batch.mask, batch.lengths) > 0)
        return found
