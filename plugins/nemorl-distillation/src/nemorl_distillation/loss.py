"""The two objectives: KL on the teacher's likeliest tokens, and the policy gradient of the sampled reverse KL.

# N = tokens of all sequences concatenated, M = masked-in ones, K = likeliest tokens of the teacher
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from nemorl.metrics import Mean, Metrics
from nemorl_tensors import TokenBatch, masked_mean
from nemorl_tensors.ratios import masked_log_ratio, probability_ratio
from nemorl_tensors.surrogate import clipped_surrogate, ratio_metrics, sampler_metrics
from torch import Tensor

from nemorl_distillation.config import KLType, OutsideTopK

FLOOR = -100.0
"""Nats. The log-prob of what cannot happen: exp gives 4e-44, and differences stay finite."""
SMALLEST_TAIL = 1e-6
"""Least probability of the tail: 1 - sum(p) in float32 is noise below this."""


@dataclass(frozen=True)
class TopKDistillationLoss:
    """KL between teacher and student, at every place of a response, over the K likeliest tokens of the teacher.

    p = student, q = teacher, over the K tokens and what ``outside_topk`` makes of the rest
    forward = sum_k q_k * (log q_k - log p_k)        reverse = sum_k p_k * (log p_k - log q_k)
    loss = sum(loss_weights * (w * forward + (1 - w) * reverse))    w = 1, 0 or mixed_kl_weight, by ``kl_type``

    ``tail``          both have a further outcome 1 - sum_k: a lower bound of the KL over the vocabulary
    ``renormalize``   both are divided by their sum_k
    ``zero``          q is divided by its sum_k, p has a further outcome 1 - sum_k, for which log q = -100

    A teacher's log-prob of -inf marks a token that the student does not have: it is part of the rest.

    GKD, arXiv:2306.13649, eq. 1. Differs from the paper: of the vocabulary only K tokens are told apart; the mixture
    is of the two divergences, not of the two distributions (the generalised Jensen-Shannon divergence).
    """

    kl_type: KLType = "mixed"
    mixed_kl_weight: float = 0.5
    outside_topk: OutsideTopK = "tail"

    requires: ClassVar[frozenset[str]] = frozenset({"candidate_ids", "teacher_logprobs"})
    """``candidate_ids`` [N, K] int64, ``teacher_logprobs`` [N, K] float32 nats."""

    def __call__(self, candidate_logprobs: Tensor, batch: TokenBatch) -> tuple[Tensor, Metrics]:
        # Rows are picked before they are used: what stands in masked slots reaches neither loss nor gradient.
        student_MK, teacher_MK = candidate_logprobs[batch.mask], batch["teacher_logprobs"][batch.mask]
        is_known = teacher_MK > -torch.inf
        student_MK, teacher_MK = (torch.where(is_known, part, FLOOR) for part in (student_MK, teacher_MK))

        student, teacher = self._outcomes(student_MK, teacher_MK)
        forward, reverse = kl_divergence(teacher, student), kl_divergence(student, teacher)
        per_token = self._forward_weight * forward + (1 - self._forward_weight) * reverse
        count = float(batch.mask.sum())
        metrics: Metrics = {
            "forward_kl": Mean(float(forward.detach().sum()), count),
            "reverse_kl": Mean(float(reverse.detach().sum()), count),
            "teacher_topk_mass": Mean(float(teacher_MK.exp().sum()), count),
            "student_topk_mass": Mean(float(student_MK.detach().exp().sum()), count),
        }
        return (per_token * batch.loss_weights[batch.mask]).sum(), metrics

    @property
    def _forward_weight(self) -> float:
        return {"forward": 1.0, "reverse": 0.0, "mixed": self.mixed_kl_weight}[self.kl_type]

    def _outcomes(self, student_MK: Tensor, teacher_MK: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probs of student and teacher over one set of outcomes: [M, K], or [M, K + 1] with a tail."""
        if self.outside_topk == "renormalize":
            return torch.log_softmax(student_MK, 1), torch.log_softmax(teacher_MK, 1)
        if self.outside_topk == "tail":
            return with_tail(student_MK), with_tail(teacher_MK)
        nothing = torch.full_like(teacher_MK[:, :1], FLOOR)
        return with_tail(student_MK), torch.cat([torch.log_softmax(teacher_MK, 1), nothing], 1)


def with_tail(logprobs_MK: Tensor) -> Tensor:
    """[M, K] log-probs of some outcomes -> [M, K + 1]: with that of all others together."""
    mass = torch.logsumexp(logprobs_MK, 1, keepdim=True).clamp(max=-SMALLEST_TAIL)  # log(1 - x) is about -x
    return torch.cat([logprobs_MK, torch.log(-torch.expm1(mass))], 1)


def kl_divergence(p: Tensor, q: Tensor) -> Tensor:
    """[M] KL(p || q) in nats, of log-probs [M, K] of the same outcomes."""
    return (p.exp() * (p - q)).sum(1)


@dataclass(frozen=True)
class SampledReverseKLLoss:
    """Policy gradient of the reverse KL: a sampled token is worth what the teacher finds it likelier than the student.

    A = max(teacher_logprobs, -100) - old_logprobs                                          (no gradient)
    ratio = exp(policy_logprobs - old_logprobs)
    loss = -sum(loss_weights * min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A))

    The expectation of -A over what the student samples is KL(student || teacher) at that place. The one-token part of
    MiniLLM's gradient (arXiv:2306.08543, section 2.2), and "On-Policy Distillation" (Thinking Machines Lab, 2025).
    Differs from the former: tokens are not credited for what follows them; the latter does not clip.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    on_policy: bool = True
    """One update per batch: the old policy is the one at hand, the ratio is exactly 1."""

    @property
    def requires(self) -> frozenset[str]:
        """All [N] float32 nats."""
        fields = {"teacher_logprobs", "generation_logprobs"}
        return frozenset(fields if self.on_policy else fields | {"old_logprobs"})

    def __call__(self, policy_logprobs: Tensor, batch: TokenBatch) -> tuple[Tensor, Metrics]:
        mask = batch.mask
        old_logprobs = policy_logprobs.detach() if self.on_policy else batch["old_logprobs"]
        advantages = torch.where(mask, batch["teacher_logprobs"].clamp(min=FLOOR) - old_logprobs, 0.0)
        ratio = probability_ratio(masked_log_ratio(policy_logprobs, old_logprobs, mask))
        surrogate, clipped_ratio = clipped_surrogate(ratio, advantages, self.clip_low, self.clip_high)
        metrics: Metrics = {
            "reverse_kl": masked_mean(-advantages, mask),
            **ratio_metrics(ratio, clipped_ratio, mask),
            **sampler_metrics(policy_logprobs, old_logprobs, batch["generation_logprobs"], mask),
        }
        return -(surrogate * batch.loss_weights).sum(), metrics
