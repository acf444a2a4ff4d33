"""What the losses have in common that compare the learner with the sampler of the tokens.

# N = tokens of all sequences concatenated

p = log-prob of the learner, q = ``logprobs`` of the sampler, r = exp(p - q), A = ``advantages``: [N] each.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from nemorl.metrics import Metric
from nemorl_tensors import TokenBatch
from nemorl_tensors.ratios import probability_ratio
from torch import Tensor

from nemorl_agents.tinker.losses.client_loss import ClientLoss, Fields, Number, total


@dataclass(frozen=True)
class RatioLoss(ClientLoss):
    """A loss of one target token at each position, and of what its sampler said of it.

    Metrics are of tokens with an advantage, the others being prompts as a rule: their number, the sums of r and of
    p - q.
    """

    @property
    def inputs(self) -> Mapping[str, Number]:
        return {"logprobs": Number(), "advantages": Number()}

    def sums(self, log_ratio: Tensor, advantages: Tensor) -> dict[str, Metric]:
        """How far the learner is from the sampler, of [N] each."""
        counts = advantages != 0
        log_ratio = torch.where(counts, log_ratio.detach(), 0.0)
        return {
            "tokens:sum": total(counts),
            "log_ratio:sum": total(log_ratio),
            "ratio:sum": total(torch.where(counts, probability_ratio(log_ratio), 0.0)),
        }


@dataclass(frozen=True)
class ClippedRatioLoss(RatioLoss):
    """A loss whose ratio is kept within bounds, which are ratios themselves: 0.8 and 1.2, say, and not 0.2.

    A datum can have bounds of its own at each token, as fields of the same names.
    """

    settings: ClassVar[Mapping[str, Number]] = {
        "clip_low_threshold": Number(lowest=0.0, highest=1.0),
        "clip_high_threshold": Number(lowest=1.0),
    }

    clip_low_threshold: float
    clip_high_threshold: float

    @property
    def inputs(self) -> Mapping[str, Number]:
        bounds = {name: replace(number, default=getattr(self, name)) for name, number in self.settings.items()}
        return {**super().inputs, **bounds}

    @abstractmethod
    def log_ratio(self, log_ratio: Tensor, fields: Fields, batch: TokenBatch) -> Tensor:
        """[N] log of the ratio that is clipped, from p - q of each token."""

    def terms(self, logprobs: Tensor, fields: Fields, batch: TokenBatch) -> tuple[Tensor, Mapping[str, Metric]]:
        advantages = fields["advantages"]
        log_ratio = self.log_ratio(logprobs - fields["logprobs"], fields, batch)
        ratio = probability_ratio(log_ratio)
        clipped_ratio = ratio.clamp(fields["clip_low_threshold"], fields["clip_high_threshold"])
        objective = self.objective(ratio, clipped_ratio, logprobs, advantages)
        is_clipped = (ratio != clipped_ratio) & (advantages != 0)
        return -objective, {**self.sums(log_ratio, advantages), "clipped_tokens:sum": total(is_clipped)}

    def objective(self, ratio: Tensor, clipped_ratio: Tensor, logprobs: Tensor, advantages: Tensor) -> Tensor:
        """[N] to be maximised. PPO's: min(r * A, clip(r) * A)                         arXiv:1707.06347, eq. 7"""
        return torch.minimum(ratio * advantages, clipped_ratio * advantages)
