"""The loss of DPO itself.

# P = pairs
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import logsigmoid

from nemorl_preference.dpo.preference import PreferenceLoss


@dataclass(frozen=True)
class SigmoidLoss(PreferenceLoss):
    """- (1 - e) * log sigmoid(beta * delta) - e * log sigmoid(-beta * delta)                     arXiv:2305.18290

    Differs from the paper: e, ``label_smoothing``, is the share of labels expected to be wrong ("conservative DPO",
    https://ericmitchell.ai/cdpo.pdf). 0 is the paper's loss.
    """

    label_smoothing: float = 0.0

    def of_deltas(self, delta_P: Tensor) -> Tensor:
        reward_gap_P = self.beta * delta_P
        loss_P = -logsigmoid(reward_gap_P)
        if self.label_smoothing:
            loss_P = (1 - self.label_smoothing) * loss_P - self.label_smoothing * logsigmoid(-reward_gap_P)
        return loss_P
