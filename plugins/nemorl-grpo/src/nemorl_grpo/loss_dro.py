"""DRO's objective: the policy is pulled towards rewards by a square, with nothing to clip.

# N = tokens of all sequences concatenated
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from nemorl.metrics import Metric
from nemorl_rl.policy_gradient.loss import PolicyGradientLoss
from nemorl_tensors import TokenBatch, masked_mean
from nemorl_tensors.ratios import masked_log_ratio, probability_ratio
from torch import Tensor


@dataclass(frozen=True)
class QuadraticDriftLoss(PolicyGradientLoss):
    """REINFORCE without a ratio, and a square that holds the policy near the old one.

    surrogate = A * policy_logprobs - drift_penalty / 2 * (policy_logprobs - old_logprobs)^2            arXiv:2405.19107

    Differs from the paper: A is an advantage against a group instead of the reward less a learned value; the square is
    of each token and not of the response, as in verl. The old policy is the one before the step, so with a single
    update per step this is plain REINFORCE.
    """

    drift_penalty: float = 0.1

    def surrogate(
        self, policy_logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, batch: TokenBatch
    ) -> tuple[Tensor, dict[str, Metric]]:
        mask = batch.mask
        log_ratio = masked_log_ratio(policy_logprobs, old_logprobs, mask)
        surrogate = torch.where(mask, policy_logprobs, 0.0) * advantages - self.drift_penalty / 2 * log_ratio.square()
        return surrogate, {"probs_ratio": masked_mean(probability_ratio(log_ratio), mask)}

    def has_gradient(self, batch: TokenBatch) -> Tensor:
        """Everywhere but on policy: the square holds tokens without an advantage back, too."""
        return self.has_advantage(batch) if self.on_policy else super().has_gradient(batch)
