"""What is minimised.

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
class ExampleLoss:
    """loss = -sum(loss_weights * advantages * policy_logprobs): the weights, which sum to 1, are all its scale."""

    requires: ClassVar[frozenset[str]] = frozenset({"advantages"})

    def __call__(self, policy_logprobs: Tensor, batch: TokenBatch) -> tuple[Tensor, Metrics]:
        credit_N = torch.where(batch.mask, batch["advantages"] * policy_logprobs, 0.0)
        return -(credit_N * batch.loss_weights).sum(), {}
