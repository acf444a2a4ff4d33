"""Negative log-likelihood.

# N = tokens of all sequences concatenated
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from nemorl.metrics import Metrics
from nemorl_tensors import TokenBatch
from torch import Tensor


@dataclass(frozen=True)
class NLLLoss:
    """loss = -sum(loss_weights * policy_logprobs): the mean negative log-likelihood of the trained tokens, in nats."""

    requires: ClassVar[frozenset[str]] = frozenset()

    def __call__(self, policy_logprobs: Tensor, batch: TokenBatch) -> tuple[Tensor, Metrics]:
        kept = torch.where(batch.mask, policy_logprobs, 0.0)
        return -(kept * batch.loss_weights).sum(), {}
