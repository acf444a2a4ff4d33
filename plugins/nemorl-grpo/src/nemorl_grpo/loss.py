"""GRPO's objective, which most of the family shares.

# N = tokens of all sequences concatenated, B = sequences
"""

from __future__ import annotations

from dataclasses import dataclass

from nemorl.metrics import Metric
from nemorl_tensors import TokenBatch
from nemorl_tensors.ratios import masked_log_ratio, probability_ratio
from nemorl_tensors.surrogate import clipped_surrogate, ratio_metrics
from torch import Tensor

from nemorl_grpo.loss_base import PolicyGradientLoss


@dataclass(frozen=True)
class ClippedPolicyGradientLoss(PolicyGradientLoss):
    """PPO's clipped surrogate on group-relative advantages, with a KL penalty to the reference.

    ratio = exp(policy_logprobs - old_logprobs)
    surrogate = min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A)
    loss = sum(loss_weights * (-w * surrogate + kl_penalty * KL(policy || reference)))     arXiv:2402.03300, eq. 3

    Differs from the paper: the average over tokens is that of ``loss_weights``; with ``dual_clip`` c, a negative
    advantage's surrogate is bounded below by c * A (arXiv:1912.09729); w is 1 unless there is a ``correction`` for a
    sampler that differs from the old policy.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None

    def surrogate(
        self, policy_logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, batch: TokenBatch
    ) -> tuple[Tensor, dict[str, Metric]]:
        ratio = probability_ratio(masked_log_ratio(policy_logprobs, old_logprobs, batch.mask))
        surrogate, clipped_ratio = clipped_surrogate(ratio, advantages, self.clip_low, self.clip_high, self.dual_clip)
        return surrogate, ratio_metrics(ratio, clipped_ratio, batch.mask)
