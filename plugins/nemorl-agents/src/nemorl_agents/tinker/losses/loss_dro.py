"""``dro``: the policy is pulled towards rewards by a square, with nothing to clip.

# N = tokens of all sequences concatenated
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from nemorl.metrics import Metric
from nemorl_tensors import TokenBatch
from torch import Tensor

from nemorl_agents.tinker.losses.client_loss import Fields, Number, total
from nemorl_agents.tinker.losses.ratio_loss import RatioLoss


@dataclass(frozen=True)
class DROLoss(RatioLoss):
    """loss = -sum(p * A - beta / 2 * (p - q)^2)                                          arXiv:2405.19107

    The square holds every token, also those without an advantage: the API knows no mask. A prompt whose q a client has
    left at 0 is therefore trained on, towards probability 1; the metric ``penalty:sum`` shows it.

    Differs from the paper: A is a (soft) advantage that the client computes, and the square is of each token.
    """

    settings: ClassVar[Mapping[str, Number]] = {"beta": Number(lowest=0.0)}

    beta: float = 0.05

    def terms(self, logprobs: Tensor, fields: Fields, batch: TokenBatch) -> tuple[Tensor, Mapping[str, Metric]]:
        log_ratio, advantages = logprobs - fields["logprobs"], fields["advantages"]
        penalty = self.beta / 2 * log_ratio.square()
        return penalty - logprobs * advantages, {**self.sums(log_ratio, advantages), "penalty:sum": total(penalty)}
