"""``importance_sampling``: policy gradient with the ratio to the sampler.

# N = tokens of all sequences concatenated
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nemorl.metrics import Metric
from nemorl_tensors import TokenBatch
from nemorl_tensors.ratios import probability_ratio
from torch import Tensor

from nemorl_agents.tinker.losses.client_loss import Fields
from nemorl_agents.tinker.losses.ratio_loss import RatioLoss


@dataclass(frozen=True)
class ImportanceSamplingLoss(RatioLoss):
    """loss = -sum(r * A)

    Differs from the formula: beyond exp(±20) the ratio is constant, as in all of our losses (``ratios``).
    """

    def terms(self, logprobs: Tensor, fields: Fields, batch: TokenBatch) -> tuple[Tensor, Mapping[str, Metric]]:
        log_ratio, advantages = logprobs - fields["logprobs"], fields["advantages"]
        return -probability_ratio(log_ratio) * advantages, self.sums(log_ratio, advantages)
