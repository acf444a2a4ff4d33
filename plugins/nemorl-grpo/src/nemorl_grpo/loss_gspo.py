"""GSPO's objective: one ratio per response.

# N = tokens of all sequences concatenated, B = sequences
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from nemorl.metrics import Metric
from nemorl_rl.policy_gradient.loss import PolicyGradientLoss
from nemorl_tensors import TokenBatch, segment_mean, segment_sum
from nemorl_tensors.ratios import masked_log_ratio, probability_ratio
from nemorl_tensors.surrogate import clipped_surrogate, ratio_metrics
from torch import Tensor


@dataclass(frozen=True)
class SequenceRatioLoss(PolicyGradientLoss):
    """A clipped surrogate whose ratio is that of the whole response, length-normalised.

    ratio_b = exp(mean over the trained tokens of b of policy_logprobs - old_logprobs)
    surrogate_b = min(ratio_b * A_b, clip(ratio_b, 1 - clip_low, 1 + clip_high) * A_b)
    loss = sum(loss_weights * (-w_b * surrogate_b + kl_penalty * KL))                 arXiv:2507.18071, eq. 5 and 7

    Every token carries the surrogate of its response, so weights of level ``sequence`` give the paper's mean over
    responses. A microbatch holds whole sequences, hence the mean needs no other one.

    Differs from the paper: w_b is 1 unless there is a ``correction``, which then sees one log ratio per response,
    normalised in the same way: mean over its tokens of old - generation. So w_b * ratio_b = exp(mean(policy -
    generation)) for kind ``plain``, GSPO's ratio against the policy that sampled. NeMo RL takes the sum, whose spread
    grows with the length. A KL term, per token, can be added; the paper has none.
    """

    clip_low: float = 3e-4
    clip_high: float = 4e-4

    def surrogate(
        self, policy_logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, batch: TokenBatch
    ) -> tuple[Tensor, dict[str, Metric]]:
        mask, lengths = batch.mask, batch.lengths
        log_ratio = masked_log_ratio(policy_logprobs, old_logprobs, mask)
        ratio_B = probability_ratio(segment_mean(log_ratio, mask, lengths))
        surrogate, _ = clipped_surrogate(ratio_B[batch.sequence_ids], advantages, self.clip_low, self.clip_high)
        clipped_ratio_B = ratio_B.clamp(1 - self.clip_low, 1 + self.clip_high)
        trained_B = segment_sum(mask.float(), mask, lengths) > 0
        advantages_B = segment_mean(advantages, mask, lengths)
        return surrogate, ratio_metrics(ratio_B, clipped_ratio_B, trained_B, advantages_B)

    def sampler_log_ratio(self, old_logprobs: Tensor, batch: TokenBatch) -> Tensor:
        """For each token the mean log ratio of its response."""
        mean_B = segment_mean(super().sampler_log_ratio(old_logprobs, batch), batch.mask, batch.lengths)
        return torch.where(batch.mask, mean_B[batch.sequence_ids], 0.0)

    def has_gradient(self, batch: TokenBatch) -> Tensor:
        return self.has_advantage(batch)
