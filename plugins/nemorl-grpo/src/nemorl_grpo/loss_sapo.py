"""SAPO's objective: a smooth gate in place of the clip, so that a token loses its gradient gradually.

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
class SoftGateLoss(PolicyGradientLoss):
    """The ratio through a sigmoid whose slope is 1 at a ratio of 1 and falls off on both sides.

    ratio = exp(policy_logprobs - old_logprobs)
    gate = 4 / tau * sigmoid(tau * (ratio - 1)),   tau = tau_positive where A > 0, else tau_negative
    surrogate = gate * A                                                                             arXiv:2511.20347

    Differs from the paper: not at all; a ``correction`` and a KL term can be added. The metric ``probs_ratio_clamped``
    is the gate, less its value at a ratio of 1, plus 1.
    """

    tau_positive: float = 1.0
    tau_negative: float = 1.05

    def surrogate(
        self, policy_logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, batch: TokenBatch
    ) -> tuple[Tensor, dict[str, Metric]]:
        ratio = probability_ratio(masked_log_ratio(policy_logprobs, old_logprobs, batch.mask))
        tau = torch.where(advantages > 0, self.tau_positive, self.tau_negative)
        gate = torch.sigmoid(tau * (ratio - 1)) * 4 / tau
        return gate * advantages, ratio_metrics(ratio, gate - 2 / tau + 1, batch.mask, advantages)

    def has_gradient(self, batch: TokenBatch) -> Tensor:
        return self.has_advantage(batch)
