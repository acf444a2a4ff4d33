"""What is minimised.

# N = tokens of all sequences concatenated
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from nemorl.metrics import Metric
from nemorl_rl.policy_gradient.loss import PolicyGradientLoss
from nemorl_tensors import TokenBatch
from torch import Tensor


@dataclass(frozen=True)
class ExampleLoss(PolicyGradientLoss):
    """loss = -sum(loss_weights * advantages * policy_logprobs): the weights, which sum to 1, are all its scale."""

    def surrogate(
        self, policy_logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, batch: TokenBatch
    ) -> tuple[Tensor, dict[str, Metric]]:
        return advantages * torch.where(batch.mask, policy_logprobs, 0.0), {}
