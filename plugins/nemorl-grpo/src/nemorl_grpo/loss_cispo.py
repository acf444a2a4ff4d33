"""CISPO's objective: the ratio is a weight, so every token keeps a gradient.

# N = tokens of all sequences concatenated
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from nemorl.metrics import Metric
from nemorl_rl.policy_gradient.loss import PolicyGradientLoss
from nemorl_tensors import TokenBatch
from nemorl_tensors.ratios import masked_log_ratio, probability_ratio
from nemorl_tensors.surrogate import ratio_metrics
from torch import Tensor


@dataclass(frozen=True)
class CappedWeightLoss(PolicyGradientLoss):
    """REINFORCE with a capped importance weight: the cap bounds a token's gradient and never removes it.

    weight = clamp(exp(policy_logprobs - old_logprobs), ratio_floor, ratio_cap), without gradient
    loss = sum(loss_weights * (-w * weight * A * policy_logprobs + kl_penalty * KL))     arXiv:2506.13585, eq. 4 and 5

    The value is not that of GRPO's loss even where the gradients agree (on policy): read the reward, not the loss.

    Differs from the paper: ``ratio_cap`` is its 1 + epsilon_high and ``ratio_floor`` its 1 - epsilon_low, which it sets
    so low that it has no effect; w is 1 unless there is a ``correction``; a KL term can be added.
    """

    ratio_cap: float = 5.0
    ratio_floor: float = 0.0

    def surrogate(
        self, policy_logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, batch: TokenBatch
    ) -> tuple[Tensor, dict[str, Metric]]:
        mask = batch.mask
        ratio = probability_ratio(masked_log_ratio(policy_logprobs.detach(), old_logprobs, mask))
        weight = ratio.clamp(self.ratio_floor, self.ratio_cap)
        surrogate = weight * advantages * torch.where(mask, policy_logprobs, 0.0)
        return surrogate, ratio_metrics(ratio, weight, mask)

    def has_gradient(self, batch: TokenBatch) -> Tensor:
        return self.has_advantage(batch)
