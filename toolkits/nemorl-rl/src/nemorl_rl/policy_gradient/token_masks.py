"""Token masks: tokens that a loss leaves out of its surrogate, judged by the policy at hand.

# N = tokens of all sequences concatenated, B = sequences

A mask does not touch ``loss_weights``: a token that is left out contributes 0 and the others weigh no more for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from nemorl.metrics import Metric
from nemorl_tensors import TokenBatch, masked_mean, segment_mean
from nemorl_tensors.ratios import masked_log_ratio
from torch import Tensor


class TokenMask(Protocol):
    """Which tokens stay, usually a frozen dataclass of the numbers that it needs.

    Example:
        >>> class Likely:
        ...     requires = frozenset()
        ...
        ...     def __call__(self, policy_logprobs, batch):
        ...         return policy_logprobs > -5.0, {}
    """

    @property
    def requires(self) -> frozenset[str]:
        """Fields that it reads of the batch."""

    def __call__(self, policy_logprobs: Tensor, batch: TokenBatch, /) -> tuple[Tensor, dict[str, Metric]]:
        """([N] without gradient, what is trained on) -> ([N] bool, True where a token stays; metrics)."""


@dataclass(frozen=True)
class OffPolicyMask:
    """Responses of negative advantage that the policy has left teach nothing.

    distance_b = mean over the trained tokens of b of generation_logprobs - policy_logprobs
    kept_t = A_t >= 0 or distance_b <= limit                    off-policy sequence mask, arXiv:2512.02556, eq. 9

    A log-prob of the sampler that is not finite counts as no distance, as in TRL.

    Example:
        >>> batch = TokenBatch.from_sequences([[5, 6], [5, 7]], [[False, True], [False, True]])
        >>> sampled, advantages = torch.tensor([0.0, -1.0, 0.0, -1.0]), torch.tensor([0.0, -1.0, 0.0, -1.0])
        >>> batch = batch.with_tokens(generation_logprobs=sampled, advantages=advantages)
        >>> OffPolicyMask(limit=0.5)(torch.tensor([0.0, -1.4, 0.0, -1.6]), batch)[0].tolist()
        [True, True, True, False]
    """

    requires: ClassVar[frozenset[str]] = frozenset({"advantages", "generation_logprobs"})

    limit: float
    """Nats per token."""

    def __call__(self, policy_logprobs: Tensor, batch: TokenBatch) -> tuple[Tensor, dict[str, Metric]]:
        mask = batch.mask
        gap = masked_log_ratio(batch["generation_logprobs"], policy_logprobs, mask)
        distance_B = segment_mean(torch.where(gap.isfinite(), gap, 0.0), mask, batch.lengths)
        advantages = torch.where(mask, batch["advantages"], 0.0)
        kept = (advantages >= 0) | (distance_B <= self.limit)[batch.sequence_ids]
        return kept, {"off_policy_masked_frac": masked_mean((~kept).float(), mask)}
