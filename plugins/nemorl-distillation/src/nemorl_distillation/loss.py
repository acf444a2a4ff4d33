"""KL on the teacher's likeliest tokens.

# N = tokens of all sequences concatenated, M = masked-in ones, S = teachers per token, K = likeliest tokens of one
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from nemorl.metrics import Metrics
from nemorl_tensors import TokenBatch, masked_mean
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
    KL = w * forward + (1 - w) * reverse             w = 1, 0 or mixed_kl_weight, by ``kl_type``; or, for ``jsd``,
    KL = jensen_shannon(p, q, jsd_beta)
    L1 = sum_j |p'_j - q'_j|                         p', q' = sorted probabilities of tokens that only one of them has
    loss = sum(loss_weights * sum_s(weight_s * (KL_s + uncommon_weight * L1_s)))    s = the teachers of a token
           + sft_weight * sum(loss_weights * -log p(token)) over responses that are given

    ``tail``          both have a further outcome 1 - sum_k: a lower bound of the KL over the vocabulary
    ``renormalize``   both are divided by their sum_k
    ``zero``          q is divided by its sum_k, p has a further outcome 1 - sum_k, for which log q = -100

    A teacher's log-prob of -inf marks a token that the student does not have: it is part of the rest. A place where
    there are no others is not compared.

    GKD, arXiv:2306.13649, eq. 1; L1: universal logit distillation, arXiv:2402.12030. Differs from the former: of the
    vocabulary only K tokens are told apart; ``mixed`` mixes the two divergences, ``jsd`` the two distributions as the
    paper does.
    """

    kl_type: KLType = "mixed"
    mixed_kl_weight: float = 0.5
    outside_topk: OutsideTopK = "tail"
    teachers: tuple[tuple[str, float], ...] = ()
    """Name and weight of each, where there are several. Empty: one, of weight 1."""
    uncommon_weight: float = 0.0
    """Weight of L1. Above 0, the student's K likeliest tokens follow those of each teacher among the candidates."""
    jsd_beta: float = 0.5
    """Share of the teacher in the mixture of ``jsd``"""
    sft_weight: float = 0.0
    """Weight of the likelihood of given responses. Above 0, the token itself is the last candidate."""

    @property
    def requires(self) -> frozenset[str]:
        """``candidate_ids`` [N, S * K] int64, ``teacher_logprobs`` [N, S * K] float32 nats.

        Of several teachers ``teacher_ids`` [N, S] int64, too: their numbers in ``teachers``. With ``uncommon_weight``,
        ``candidate_ids`` [N, S * 2K], ``teacher_uncommon`` [N, S * K] float32 nats of tokens that the student lacks,
        ``student_uncommon`` [N, S * K] bool, True for those of the student's own that the teacher lacks. With
        ``sft_weight``, one more column of ``candidate_ids`` and ``is_given`` [B] bool.
        """
        given = {"is_given"} if self.sft_weight else set()
        uncommon = {"teacher_uncommon", "student_uncommon"} if self.uncommon_weight else set()
        return frozenset(
            {"candidate_ids", "teacher_logprobs"} | ({"teacher_ids"} if self.teachers else set()) | uncommon | given
        )

    def __call__(self, candidate_logprobs: Tensor, batch: TokenBatch) -> tuple[Tensor, Metrics]:
        if self.sft_weight:
            return self._with_likelihood(candidate_logprobs, batch)
        return self._of_candidates(candidate_logprobs, batch)

    def _with_likelihood(self, candidate_logprobs: Tensor, batch: TokenBatch) -> tuple[Tensor, Metrics]:
        """The last candidate is the token itself."""
        divergence, metrics = self._of_candidates(candidate_logprobs[:, :-1], batch)
        is_learnt = batch.mask & batch["is_given"][batch.sequence_ids]
        nll = torch.where(is_learnt, -candidate_logprobs[:, -1], 0.0)
        loss = divergence + self.sft_weight * (nll * torch.where(is_learnt, batch.loss_weights, 0.0)).sum()
        return loss, {**metrics, "sft_loss": masked_mean(nll, is_learnt)}

    def _of_candidates(self, candidate_logprobs: Tensor, batch: TokenBatch) -> tuple[Tensor, Metrics]:
        # Rows are picked before they are used: what stands in masked slots reaches neither loss nor gradient.
        student, teacher = candidate_logprobs[batch.mask], batch["teacher_logprobs"][batch.mask]
        teacher_ids_MS = batch["teacher_ids"][batch.mask] if self.teachers else torch.zeros_like(teacher[:, :1]).long()
        shape = (*teacher_ids_MS.shape, teacher.shape[1] // teacher_ids_MS.shape[1])
        student = student.view(*shape[:2], student.shape[1] // shape[1])
        student_MSK, teacher_MSK = student[..., : shape[2]], teacher.view(shape)
        is_known = teacher_MSK > -torch.inf
        student_MSK, teacher_MSK = (torch.where(is_known, part, FLOOR) for part in (student_MSK, teacher_MSK))

        compared_MS = is_known.any(-1)
        outcomes = self._outcomes(student_MSK, teacher_MSK)
        forward, reverse = kl_divergence(*reversed(outcomes)), kl_divergence(*outcomes)
        per_place_MS = self._forward_weight * forward + (1 - self._forward_weight) * reverse
        optional: Metrics = {}
        if self.kl_type == "jsd":
            per_place_MS = jensen_shannon(*outcomes, self.jsd_beta)
            optional = {"jsd": masked_mean(per_place_MS, compared_MS)}
        weights = torch.tensor([weight for _, weight in self.teachers] or [1.0], device=student.device)
        per_place_MS = torch.where(compared_MS, per_place_MS, 0.0)
        if self.uncommon_weight:
            distance_MS = self._distance(student[..., shape[2] :], batch, shape)
            per_place_MS = per_place_MS + self.uncommon_weight * distance_MS
            optional = {**optional, "uncommon_distance": masked_mean(distance_MS, compared_MS)}
        per_token_M = (per_place_MS * weights[teacher_ids_MS]).sum(1)
        by_teacher = {
            f"reverse_kl/{name}": masked_mean(reverse, compared_MS & (teacher_ids_MS == number))
            for number, (name, _) in enumerate(self.teachers)
        }
        metrics: Metrics = {
            "forward_kl": masked_mean(forward, compared_MS),
            "reverse_kl": masked_mean(reverse, compared_MS),
            "compared_frac": masked_mean(compared_MS.float(), torch.ones_like(compared_MS)),
            "teacher_topk_mass": masked_mean(teacher_MSK.exp().sum(-1), compared_MS),
            "student_topk_mass": masked_mean(student_MSK.exp().sum(-1), compared_MS),
            **by_teacher,
            **optional,
        }
        return (per_token_M * batch.loss_weights[batch.mask]).sum(), metrics

    def _distance(self, own_MSK: Tensor, batch: TokenBatch, shape: tuple[int, ...]) -> Tensor:
        """[M, S] L1: tokens of one side only have no counterparts but those of the same rank."""
        is_own = batch["student_uncommon"][batch.mask].view(shape)
        ours = torch.where(is_own, torch.where(is_own, own_MSK, FLOOR).exp(), 0.0)
        theirs = batch["teacher_uncommon"][batch.mask].view(shape).exp()
        ours, theirs = (part.sort(-1, descending=True).values for part in (ours, theirs))
        return (ours - theirs).abs().sum(-1)

    @property
    def _forward_weight(self) -> float:
        return {"forward": 1.0, "reverse": 0.0}.get(self.kl_type, self.mixed_kl_weight)

    def _outcomes(self, student: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probs of student and teacher over one set of outcomes: [..., K], or [..., K + 1] with a tail."""
        if self.outside_topk == "renormalize":
            return torch.log_softmax(student, -1), torch.log_softmax(teacher, -1)
        if self.outside_topk == "tail":
            return with_tail(student), with_tail(teacher)
        nothing = torch.full_like(teacher[..., :1], FLOOR)
        return with_tail(student), torch.cat([torch.log_softmax(teacher, -1), nothing], -1)


def with_tail(logprobs: Tensor) -> Tensor:
    """[..., K] log-probs of some outcomes -> [..., K + 1]: with that of all others together."""
    mass = torch.logsumexp(logprobs, -1, keepdim=True).clamp(max=-SMALLEST_TAIL)  # log(1 - x) is about -x
    return torch.cat([logprobs, torch.log(-torch.expm1(mass))], -1)


def kl_divergence(p: Tensor, q: Tensor) -> Tensor:
    """[...] KL(p || q) in nats, of log-probs [..., K] of the same outcomes."""
    return (p.exp() * (p - q)).sum(-1)


def jensen_shannon(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """[...] beta * KL(q || m) + (1 - beta) * KL(p || m),  m = beta * q + (1 - beta) * p     arXiv:2306.13649, eq. 1

    The generalised Jensen-Shannon divergence, in nats. It is bounded, by log 2 at beta = 1/2, whatever one of the two
    excludes. Divided by beta it tends to the forward KL as beta goes to 0; divided by 1 - beta to the reverse KL as
    beta goes to 1.

    Args:
        student: [..., K] log-probs p.
        teacher: [..., K] log-probs q, of the same outcomes.
        beta: Between 0 and 1.
    """
    mixture = torch.logaddexp(teacher + math.log(beta), student + math.log1p(-beta))
    return beta * kl_divergence(teacher, mixture) + (1 - beta) * kl_divergence(student, mixture)
