"""KL-Cov's objective: the tokens that would cost most of the entropy pay for moving.

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
class KLCovLoss(PolicyGradientLoss):
    """The ratio without a clip; covariant tokens pay for their distance to the old policy.

    surrogate = ratio * A - cov_penalty * |policy_logprobs - old_logprobs| if covariant             arXiv:2505.22617

    Differs from the paper: tokens are chosen once a step, by the old policy's log-probs, and not before each update.
    """

    cov_penalty: float = 1.0

    @property
    def requires(self) -> frozenset[str]:
        return super().requires | {"covariant"}

    def surrogate(
        self, policy_logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, batch: TokenBatch
    ) -> tuple[Tensor, dict[str, Metric]]:
        log_ratio = masked_log_ratio(policy_logprobs, old_logprobs, batch.mask)
        ratio = probability_ratio(log_ratio)
        penalty = torch.where(batch.mask & batch["covariant"], self.cov_penalty * log_ratio.abs(), 0.0)
        return ratio * advantages - penalty, ratio_metrics(ratio, ratio, batch.mask)
