"""The policy gradient of the sampled reverse KL.

# N = tokens of all sequences concatenated
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from nemorl.metrics import Metrics
from nemorl_tensors import TokenBatch, masked_mean
from nemorl_tensors.ratios import masked_log_ratio, probability_ratio
from nemorl_tensors.surrogate import clipped_surrogate, ratio_metrics, sampler_metrics
from torch import Tensor

from nemorl_distillation.loss import FLOOR


@dataclass(frozen=True)
class SampledReverseKLLoss:
    """Policy gradient of the reverse KL: a sampled token is worth what the teacher finds it likelier than the student.

    A = teacher_weights * (max(teacher_logprobs, -100) - old_logprobs)                      (no gradient)
    ratio = exp(policy_logprobs - old_logprobs)
    loss = -sum(loss_weights * min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A))

    With several teachers ``teacher_weights`` is the sum of their weights and ``teacher_logprobs`` the mean by them, so
    that A is the sum of theirs; otherwise the weight is 1.

    The expectation of -A over what the student samples is KL(student || teacher) at that place. The one-token part of
    MiniLLM's gradient (arXiv:2306.08543, section 2.2), and "On-Policy Distillation" (Thinking Machines Lab, 2025).
    Differs from the former: tokens are not credited for what follows them; the latter does not clip.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    on_policy: bool = True
    """One update per batch: the old policy is the one at hand, the ratio is exactly 1."""
    is_weighted: bool = False
    """There are several teachers."""

    @property
    def requires(self) -> frozenset[str]:
        """All [N] float32: log-probs in nats, and ``teacher_weights``."""
        asked = {"old_logprobs": not self.on_policy, "teacher_weights": self.is_weighted}
        return frozenset({"teacher_logprobs", "generation_logprobs"} | {name for name in asked if asked[name]})

    def __call__(self, policy_logprobs: Tensor, batch: TokenBatch) -> tuple[Tensor, Metrics]:
        mask = batch.mask
        old_logprobs = policy_logprobs.detach() if self.on_policy else batch["old_logprobs"]
        gaps = torch.where(mask, batch["teacher_logprobs"].clamp(min=FLOOR) - old_logprobs, 0.0)
        advantages = torch.where(mask, gaps * batch["teacher_weights"], 0.0) if self.is_weighted else gaps
        ratio = probability_ratio(masked_log_ratio(policy_logprobs, old_logprobs, mask))
        surrogate, clipped_ratio = clipped_surrogate(ratio, advantages, self.clip_low, self.clip_high)
        metrics: Metrics = {
            "reverse_kl": masked_mean(-gaps, mask),
            **ratio_metrics(ratio, clipped_ratio, mask),
            **sampler_metrics(policy_logprobs, old_logprobs, batch["generation_logprobs"], mask),
        }
        return -(surrogate * batch.loss_weights).sum(), metrics
