"""GMPO's objective: the geometric mean of clipped token ratios, which one token cannot carry away.

# N = tokens of all sequences concatenated, B = sequences
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from nemorl.metrics import Metric
from nemorl_tensors import TokenBatch, segment_mean
from nemorl_tensors.ratios import masked_log_ratio, probability_ratio
from nemorl_tensors.surrogate import ratio_metrics
from torch import Tensor

from nemorl_grpo.loss_gspo import SequenceRatioLoss


@dataclass(frozen=True)
class GeometricMeanLoss(SequenceRatioLoss):
    """One ratio per response, each token clipped before they are averaged.

    clipped_t = clip(log_ratio_t, -clip_low, clip_high),   log_ratio = policy_logprobs - old_logprobs
    A >= 0: bounded_t = min(log_ratio_t, clipped_t);   A < 0: max(log_ratio_t, clipped_t)
    surrogate_b = exp(mean over the trained tokens of b of bounded_t) * A_b                   arXiv:2507.20673

    Every token carries the surrogate of its response, as in GSPO, whose ``sampler_log_ratio`` a ``correction`` is told.

    Differs from the paper: a KL term can be added. Its bounds are of log ratios, exp(0.4) = 1.49.
    """

    clip_low: float = 0.4
    clip_high: float = 0.4

    def surrogate(
        self, policy_logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, batch: TokenBatch
    ) -> tuple[Tensor, dict[str, Metric]]:
        mask, lengths = batch.mask, batch.lengths
        log_ratio = masked_log_ratio(policy_logprobs, old_logprobs, mask)
        clipped = log_ratio.clamp(-self.clip_low, self.clip_high)
        lower, upper = torch.minimum(log_ratio, clipped), torch.maximum(log_ratio, clipped)
        ratio_B = probability_ratio(segment_mean(torch.where(advantages < 0, upper, lower), mask, lengths))
        metrics = ratio_metrics(probability_ratio(log_ratio), probability_ratio(clipped), mask, advantages)
        advantages_B = segment_mean(advantages, mask, lengths)
        return torch.where(mask, (ratio_B * advantages_B)[batch.sequence_ids], 0.0), metrics

    def has_gradient(self, batch: TokenBatch) -> Tensor:
        return self.has_advantage(batch)
