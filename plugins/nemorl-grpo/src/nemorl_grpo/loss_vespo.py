"""VESPO's objective: a smooth weight of whole responses, largest where the policy is still the sampler.

# N = tokens of all sequences concatenated, B = sequences
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from nemorl.metrics import Metric
from nemorl_rl.policy_gradient.loss import PolicyGradientLoss
from nemorl_tensors import TokenBatch, masked_mean, segment_sum
from nemorl_tensors.ratios import LOG_RATIO_LIMIT, masked_log_ratio
from torch import Tensor

SMALLEST_LOG_WEIGHT = math.log(1e-8)


@dataclass(frozen=True)
class GammaWeightLoss(PolicyGradientLoss):
    """REINFORCE weighed by a gamma kernel of the importance weight of the response.

    log w_b = sum over the trained tokens of b of policy_logprobs - generation_logprobs
    phi(w) = exp(lambda) * w^k * exp(-lambda * w), without gradient;   phi(1) = 1
    surrogate = phi(w_b) * A * policy_logprobs                                                        arXiv:2602.10693

    k and lambda are ``k_positive`` and ``lambda_positive`` where A >= 0, else ``k_negative`` and ``lambda_negative``.
    The weight is that against the sampler, so there is nothing left for a correction to correct.

    Differs from the paper: a token's log ratio counts within ±20 nats, that of a response from log(1e-8) to 20, as in
    TRL; one that is not finite counts as 0. A KL term can be added.
    """

    k_positive: float = 2.0
    lambda_positive: float = 3.0
    k_negative: float = 3.0
    lambda_negative: float = 2.0

    def surrogate(
        self, policy_logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, batch: TokenBatch
    ) -> tuple[Tensor, dict[str, Metric]]:
        mask = batch.mask
        log_ratio = masked_log_ratio(policy_logprobs.detach(), batch["generation_logprobs"], mask)
        bounded = torch.where(log_ratio.isfinite(), log_ratio, 0.0).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        log_weight_B = segment_sum(bounded, mask, batch.lengths).clamp(SMALLEST_LOG_WEIGHT, LOG_RATIO_LIMIT)
        log_weight = log_weight_B[batch.sequence_ids]
        k = torch.where(advantages >= 0, self.k_positive, self.k_negative)
        rate = torch.where(advantages >= 0, self.lambda_positive, self.lambda_negative)
        phi = torch.exp(rate + k * log_weight - rate * log_weight.exp())
        surrogate = phi * advantages * torch.where(mask, policy_logprobs, 0.0)
        return surrogate, {
            "probs_ratio": masked_mean(bounded.exp(), mask),
            "response_weight": masked_mean(phi, mask),
        }

    def has_gradient(self, batch: TokenBatch) -> Tensor:
        return self.has_advantage(batch)
