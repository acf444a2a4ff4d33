"""``cross_entropy``: weighted negative log-likelihood.

# N = tokens of all sequences concatenated, K = target tokens at each position
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from nemorl.metrics import Metric
from nemorl_tensors import TokenBatch
from torch import Tensor

from nemorl_agents.tinker.losses.client_loss import ClientLoss, Fields, Number, total


@dataclass(frozen=True)
class CrossEntropyLoss(ClientLoss):
    """loss = sum(-weights * p), over every target token of every position.

    Weights may have any sign: a custom loss C that runs in the client is sent as this one with weights -dC/dp. Where a
    datum has none they are 1. Soft targets are K tokens at each position with the teacher's probabilities as weights.
    """

    takes_several: ClassVar[bool] = True

    @property
    def inputs(self) -> Mapping[str, Number]:
        return {"weights": Number(default=1.0)}

    def terms(self, logprobs: Tensor, fields: Fields, batch: TokenBatch) -> tuple[Tensor, Mapping[str, Metric]]:
        weights = fields["weights"]
        return -weights * logprobs, {"weights:sum": total(weights), "tokens:sum": total(weights != 0)}
