"""Losses of policy-gradient algorithms: what all have in common, and the clipped surrogate that most of them use.

# N = tokens of all sequences concatenated
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from nemorl.metrics import Metric, Metrics
from nemorl_tensors import KLTerm, TokenBatch, masked_mean, segment_sum
from nemorl_tensors.ratios import masked_log_ratio, probability_ratio
from nemorl_tensors.surrogate import clipped_surrogate, ratio_metrics, sampler_metrics
from torch import Tensor

from nemorl_rl.policy_gradient.correction import Correction
from nemorl_rl.policy_gradient.token_masks import TokenMask


@dataclass(frozen=True, kw_only=True)
class PolicyGradientLoss:
    """A surrogate of the advantages, weighed by a correction, with a KL penalty to the reference.

    loss = sum(loss_weights * (-w * surrogate + kl_penalty * KL(policy || reference) - entropy_bonus * entropy))

    Neither correction nor token masks touch the KL term. A subclass is a frozen dataclass that defines ``surrogate``.

    Example:
        >>> @dataclass(frozen=True)
        ... class ReinforceLoss(PolicyGradientLoss):
        ...     "surrogate = A * policy_logprobs (Williams, 1992)"
        ...
        ...     def surrogate(self, policy_logprobs, old_logprobs, advantages, batch):
        ...         return advantages * torch.where(batch.mask, policy_logprobs, 0.0), {}
        >>> batch = TokenBatch.from_sequences([[5, 6, 7]], [[False, True, True]])
        >>> sampled = torch.tensor([0.0, -1.0, -2.0])
        >>> batch = batch.with_tokens(advantages=torch.tensor([0.0, 1.0, 1.0]), generation_logprobs=sampled)
        >>> loss, metrics = ReinforceLoss(on_policy=True)(sampled, batch)
        >>> float(loss)  # -(1 * -1 + 1 * -2) / 2 trained tokens
        1.5
    """

    kl_penalty: float = 0.0
    kl: KLTerm = field(default_factory=KLTerm)
    """How the KL is estimated and bounded, and which gradient it has."""
    on_policy: bool = False
    """One update per batch: the old policy is the one at hand, the ratio is exactly 1."""
    correction: Correction | None = None
    """Weights w of the surrogate from old and generation log-probs; without gradient."""
    token_masks: tuple[TokenMask, ...] = ()
    """Leave tokens out of the surrogate; the others weigh no more for it."""
    entropy_bonus: float = 0.0
    """Weight of the policy's entropy, which is taken off the loss; the batch's ``keep`` then asks for moments."""

    @property
    def requires(self) -> frozenset[str]:
        fields = {"advantages", "generation_logprobs"}.union(*(each.requires for each in self.token_masks))
        if not self.on_policy:
            fields.add("old_logprobs")
        if self.kl_penalty > 0:
            fields.add("reference_logprobs")
        return frozenset(fields)

    def surrogate(
        self, policy_logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, batch: TokenBatch
    ) -> tuple[Tensor, dict[str, Metric]]:
        """[N] to be maximised, 0 in masked slots, and how far the policy has moved.

        Args:
            policy_logprobs: [N] with gradient.
            old_logprobs: [N], on policy those at hand without gradient.
            advantages: [N], 0 in masked slots.
            batch: What is trained on. Masked slots of log-probs may hold anything.
        """
        raise NotImplementedError(f"{type(self).__name__} must define surrogate()")

    def __init_subclass__(cls, **options: Any) -> None:
        # Another objective may have a gradient where the one it derives from has none.
        super().__init_subclass__(**options)
        if {"surrogate", "__call__"} & cls.__dict__.keys() and "has_gradient" not in cls.__dict__:
            cls.has_gradient = PolicyGradientLoss.has_gradient  # type: ignore[method-assign]

    def has_gradient(self, batch: TokenBatch) -> Tensor:
        """[B] bool, False where the sequence gives no gradient: it gets no backward pass. All True unless overridden.

        Where ``surrogate`` is a multiple of the advantages, :meth:`has_advantage` is the answer. A subclass that
        defines another ``surrogate`` or ``__call__`` does not inherit it.
        """
        return torch.ones_like(batch.lengths, dtype=torch.bool)

    def has_advantage(self, batch: TokenBatch) -> Tensor:
        """[B] bool, True where an advantage of a trained token is not exactly 0; everywhere with a KL penalty or bonus.

        Example:
            >>> batch = TokenBatch.from_sequences([[5, 6], [5, 7]], [[False, True], [False, True]])
            >>> batch = batch.with_tokens(advantages=torch.tensor([0.0, 0.5, 0.0, 0.0]))
            >>> ClippedPolicyGradientLoss().has_advantage(batch).tolist()
            [True, False]
        """
        if self.kl_penalty > 0 or self.entropy_bonus > 0:
            return torch.ones_like(batch.lengths, dtype=torch.bool)
        return segment_sum((batch["advantages"] != 0).float(), batch.mask, batch.lengths) > 0

    def sampler_log_ratio(self, old_logprobs: Tensor, batch: TokenBatch) -> Tensor:
        """[N] what the correction is told of the sampler: old - generation, without gradient, 0 in masked slots."""
        return masked_log_ratio(old_logprobs.detach(), batch["generation_logprobs"], batch.mask)

    def __call__(self, policy_logprobs: Tensor, batch: TokenBatch) -> tuple[Tensor, Metrics]:
        metrics: dict[str, Metric] = {}
        whole_logprobs, trained = policy_logprobs, batch.mask
        entropies = policy_logprobs  # read with a bonus alone
        if batch.keep is not None and batch.keep.beside_moments:
            policy_logprobs, entropies, _ = policy_logprobs.unbind(-1)
            whole_logprobs = policy_logprobs
        elif batch.keep is not None and batch.keep.beside_whole:
            policy_logprobs, whole_logprobs = policy_logprobs.unbind(-1)
        if batch.keep is not None and batch.keep.alone is not None:
            # The sampler kept a token that the policy of now would not: it has probability 0 and no gradient.
            inside = policy_logprobs.detach().isfinite()
            metrics["filtered_out_frac"] = masked_mean((~inside).float(), batch.mask)
            batch = replace(batch, mask=batch.mask & inside)
        mask = batch.mask
        advantages = torch.where(mask, batch["advantages"], 0.0)
        old_logprobs = policy_logprobs.detach() if self.on_policy else batch["old_logprobs"]

        surrogate, ratios = self.surrogate(policy_logprobs, old_logprobs, advantages, batch)
        metrics |= ratios
        metrics |= sampler_metrics(policy_logprobs, old_logprobs, batch["generation_logprobs"], mask)
        per_token = -surrogate
        if self.correction is not None:
            weights, correction_metrics = self.correction(self.sampler_log_ratio(old_logprobs, batch), batch)
            per_token = weights * per_token
            metrics |= correction_metrics
        for token_mask in self.token_masks:
            kept, mask_metrics = token_mask(policy_logprobs.detach(), batch)
            per_token = torch.where(kept, per_token, 0.0)
            metrics |= mask_metrics
        if self.kl_penalty > 0:
            # The reference was no sampler: the KL is over the whole vocabulary, and of every trained token.
            drawn = old_logprobs if self.kl.weighted_by == "old" else batch["generation_logprobs"]
            kl = self.kl.loss_term(whole_logprobs, batch["reference_logprobs"], drawn, trained)
            per_token = per_token + self.kl_penalty * kl
            metrics["kl_penalty"] = masked_mean(kl, trained)
        if self.entropy_bonus > 0:
            per_token = per_token - self.entropy_bonus * torch.where(trained, entropies, 0.0)
            metrics["entropy"] = masked_mean(entropies, trained)
        return (per_token * batch.loss_weights).sum(), metrics


@dataclass(frozen=True)
class ClippedPolicyGradientLoss(PolicyGradientLoss):
    """PPO's clipped surrogate, token by token, with a KL penalty to the reference.

    ratio = exp(policy_logprobs - old_logprobs)
    surrogate = min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A)
    loss = sum(loss_weights * (-w * surrogate + kl_penalty * KL(policy || reference)))     arXiv:2402.03300, eq. 3

    Differs from the paper: the average over tokens is that of ``loss_weights``; with ``dual_clip`` c, a negative
    advantage's surrogate is bounded below by c * A (arXiv:1912.09729); w is 1 unless there is a ``correction`` for a
    sampler that differs from the old policy.

    Example:
        >>> batch = TokenBatch.from_sequences([[5, 6]], [[False, True]])
        >>> old = torch.tensor([0.0, -1.0])
        >>> batch = batch.with_tokens(advantages=torch.ones(2), old_logprobs=old, generation_logprobs=old)
        >>> loss, metrics = ClippedPolicyGradientLoss(clip_high=0.25)(old + 1.0, batch)
        >>> float(loss), metrics["probs_ratio_clamped_frac"].value  # the ratio e counts as 1.25
        (-1.25, 1.0)
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None

    def surrogate(
        self, policy_logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, batch: TokenBatch
    ) -> tuple[Tensor, dict[str, Metric]]:
        ratio = probability_ratio(masked_log_ratio(policy_logprobs, old_logprobs, batch.mask))
        surrogate, clipped_ratio = clipped_surrogate(ratio, advantages, self.clip_low, self.clip_high, self.dual_clip)
        return surrogate, ratio_metrics(ratio, clipped_ratio, batch.mask, advantages)

    def has_gradient(self, batch: TokenBatch) -> Tensor:
        return self.has_advantage(batch)
