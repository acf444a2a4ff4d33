"""The Bradley-Terry loss of reward models.

# N = tokens of all sequences concatenated, B = sequences, P = pairs (B = 2P)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from nemorl.metrics import Metrics, Sum
from nemorl_tensors import TokenBatch, pair_weights, preference_metrics, segment_sum, split_pairs
from nemorl_tensors.pairs import over_pairs
from torch import Tensor
from torch.nn.functional import softplus


@dataclass(frozen=True)
class BradleyTerryLoss:
    """loss = mean over pairs of [ -log sigmoid(r_chosen - r_rejected - margin) + c * (r_chosen + r_rejected)^2 ]

    The first term is that of InstructGPT (arXiv:2203.02155, eq. 1); c, ``center_weight``, is arXiv:2312.09244's.
    Differs from the papers: ``margin`` (arXiv:2307.09288, eq. 2) asks for more distance where the data knows by how
    much the chosen response is better. It is 0 in data without such a column.
    """

    requires: ClassVar[frozenset[str]] = frozenset({"margins"})
    """[B] of its pair, twice"""

    center_weight: float = 0.0

    def __call__(self, values: Tensor, batch: TokenBatch) -> tuple[Tensor, Metrics]:
        """``values`` [N] are scored at one token of each sequence, the one past the end of its text."""
        chosen_P, rejected_P = split_pairs(segment_sum(values, batch.mask, batch.lengths))
        weights_P = pair_weights(batch)
        preference = over_pairs(softplus(rejected_P - chosen_P + batch["margins"][0::2]), weights_P)
        center = over_pairs((chosen_P + rejected_P).square(), weights_P)
        return preference + self.center_weight * center, {
            **preference_metrics(chosen_P, rejected_P, weights_P > 0),
            "preference_loss": Sum(float(preference.detach())),
            "center_loss": Sum(float(center.detach())),
        }
