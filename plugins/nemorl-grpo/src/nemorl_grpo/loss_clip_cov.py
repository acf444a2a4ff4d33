"""Clip-Cov's objective: a few tokens that would cost most of the entropy are left out.

# N = tokens of all sequences concatenated
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from nemorl.metrics import Metric
from nemorl_rl.policy_gradient.loss import ClippedPolicyGradientLoss
from nemorl_tensors import TokenBatch
from torch import Tensor


@dataclass(frozen=True)
class ClipCovLoss(ClippedPolicyGradientLoss):
    """PPO's clipped surrogate but for the tokens that :class:`nemorl_grpo.covariant.MarkCovariant` has drawn.

    surrogate = 0 if covariant else min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A)      arXiv:2505.22617

    Differs from the paper: tokens are chosen once a step, by the old policy's log-probs, and not before each update.
    """

    @property
    def requires(self) -> frozenset[str]:
        return super().requires | {"covariant"}

    def surrogate(
        self, policy_logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, batch: TokenBatch
    ) -> tuple[Tensor, dict[str, Metric]]:
        surrogate, metrics = super().surrogate(policy_logprobs, old_logprobs, advantages, batch)
        return torch.where(batch.mask & batch["covariant"], 0.0, surrogate), metrics

    def has_gradient(self, batch: TokenBatch) -> Tensor:
        return self.has_advantage(batch)
