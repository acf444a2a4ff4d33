"""The few tokens that cost the most entropy, which Clip-Cov leaves out and KL-Cov holds back.

# N = tokens of all sequences concatenated

A step lowers the entropy by about the covariance of log-probs and advantages (arXiv:2505.22617), and a few
tokens make up most of it. Which these are is decided on the whole batch, before the first update, and stands in the
field ``covariant``: a microbatch cannot know.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from nemorl.metrics import Metric
from nemorl.types import Samples
from nemorl_rl.rollouts.seeding import derive_seed
from nemorl_tensors import TokenBatch, masked_mean
from torch import Tensor


def covariances(advantages: Tensor, logprobs: Tensor, mask: Tensor) -> Tensor:
    """[M] of the trained tokens: ``(A - mean A) * (logprob - mean logprob)``, over all of them."""
    advantages, logprobs = advantages[mask], logprobs[mask]
    return (advantages - advantages.mean()) * (logprobs - logprobs.mean())


@dataclass(frozen=True)
class RandomInBand:
    """A share of all tokens, drawn from those whose covariance is within (low, high): Clip-Cov's choice."""

    fraction: float
    low: float
    high: float

    def __call__(self, covariances_M: Tensor, generator: torch.Generator) -> Tensor:
        """Indices of the chosen."""
        candidates = torch.nonzero((covariances_M > self.low) & (covariances_M < self.high)).squeeze(1)
        count = max(int(self.fraction * covariances_M.numel()), 1)
        return candidates[torch.randperm(candidates.numel(), generator=generator)[:count]]


@dataclass(frozen=True)
class Highest:
    """The share of all tokens whose covariance is highest: KL-Cov's choice."""

    fraction: float

    def __call__(self, covariances_M: Tensor, generator: torch.Generator) -> Tensor:
        """Indices of the chosen."""
        count = min(max(int(self.fraction * covariances_M.numel()), 1), covariances_M.numel())
        return covariances_M.topk(count).indices


@dataclass(frozen=True)
class MarkCovariant:
    """The field ``covariant`` [N] bool, chosen by the covariances of the old policy's log-probs."""

    requires: ClassVar[frozenset[str]] = frozenset({"advantages", "old_logprobs"})

    choose: Callable[[Tensor, torch.Generator], Tensor]

    def __call__(self, batch: TokenBatch, samples: Samples) -> tuple[TokenBatch, dict[str, Metric]]:
        found = covariances(batch["advantages"], batch["old_logprobs"], batch.mask)
        # A batch's own tokens are the seed: the same after a resume, and another in each step.
        seed = derive_seed("covariant", batch.num_tokens, int(batch.token_ids.sum()))
        places = torch.nonzero(batch.mask).squeeze(1)[self.choose(found, torch.Generator().manual_seed(seed))]
        covariant = torch.zeros_like(batch.mask).index_fill(0, places, True)
        return batch.with_tokens(covariant=covariant), {"covariant_frac": masked_mean(covariant.float(), batch.mask)}
