"""Token masks: tokens that a loss leaves out of its surrogate, judged by the policy at hand or marked before the step.

# N = tokens of all sequences concatenated, B = sequences

A mask does not touch ``loss_weights``: a token that is left out contributes 0 and the others weigh no more for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from nemorl.metrics import Metric
from nemorl.types import Samples
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


@dataclass(frozen=True)
class StaleTokenMask:
    """Tokens of weights that are too old teach nothing; the rest of their response does.

    staleness_t = version of the weights that learn - version of the weights that token t was sampled from
    kept_t = staleness_t <= limit

    The bound of asynchronous runs is on a group's oldest token. This one is on each token, so a response that is
    sampled over many updates, as those of hard tasks are, still teaches by its end.

    Example:
        >>> batch = TokenBatch.from_sequences([[5, 6, 7]], [[False, True, True]])
        >>> batch = batch.with_tokens(staleness=torch.tensor([3.0, 3.0, 1.0]))
        >>> StaleTokenMask(limit=2)(torch.zeros(3), batch)[0].tolist()
        [False, False, True]
    """

    requires: ClassVar[frozenset[str]] = frozenset({"staleness"})

    limit: int
    """Versions, which count the trainer's steps."""

    def __call__(self, policy_logprobs: Tensor, batch: TokenBatch) -> tuple[Tensor, dict[str, Metric]]:
        staleness = batch["staleness"]
        kept = staleness <= self.limit
        metrics: dict[str, Metric] = {
            "token_staleness": masked_mean(staleness, batch.mask),
            "stale_masked_frac": masked_mean((~kept).float(), batch.mask),
        }
        return kept, metrics


@dataclass(frozen=True)
class MarkHighEntropy:
    """The field ``high_entropy`` [N] bool: the share of the batch's trained tokens where the policy was least sure.

    marked_t = old_entropy_t >= the quantile 1 - fraction of all trained tokens               arXiv:2506.01939, eq. 5

    Differs from TRL: once a step, by the old policy, so that microbatches cannot change it.

    Example:
        >>> batch = TokenBatch.from_sequences([[5, 6, 7, 8]], [[False, True, True, True]])
        >>> batch = batch.with_tokens(old_entropies=torch.tensor([0.0, 0.1, 2.0, 0.7]))
        >>> MarkHighEntropy(0.5)(batch, Samples(()))[0]["high_entropy"].tolist()
        [False, False, True, True]
    """

    requires: ClassVar[frozenset[str]] = frozenset({"old_entropies"})

    fraction: float

    def __call__(self, batch: TokenBatch, samples: Samples) -> tuple[TokenBatch, dict[str, Metric]]:
        entropies = batch["old_entropies"]
        trained = entropies[batch.mask].sort().values
        threshold = torch.inf
        if trained.numel():
            place = (1 - self.fraction) * (trained.numel() - 1)
            below, above = (float(trained[index]) for index in (int(place), min(int(place) + 1, trained.numel() - 1)))
            threshold = below + (above - below) * (place - int(place))
        metrics: dict[str, Metric] = {"old_entropy": masked_mean(entropies, batch.mask)}
        return batch.with_tokens(high_entropy=batch.mask & (entropies >= threshold)), metrics


@dataclass(frozen=True)
class HighEntropyMask:
    """Tokens that :class:`MarkHighEntropy` has marked stay.

    Example:
        >>> batch = TokenBatch.from_sequences([[5, 6]], [[False, True]])
        >>> HighEntropyMask()(torch.zeros(2), batch.with_tokens(high_entropy=torch.tensor([False, True])))[0].tolist()
        [False, True]
    """

    requires: ClassVar[frozenset[str]] = frozenset({"high_entropy"})

    def __call__(self, policy_logprobs: Tensor, batch: TokenBatch) -> tuple[Tensor, dict[str, Metric]]:
        kept = batch["high_entropy"]
        return kept, {"high_entropy_frac": masked_mean(kept.float(), batch.mask)}
