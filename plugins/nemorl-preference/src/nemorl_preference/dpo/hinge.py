"""The hinge loss on implicit rewards.

# P = pairs
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nemorl_preference.dpo.preference import PreferenceLoss


@dataclass(frozen=True)
class HingeLoss(PreferenceLoss):
    """max(0, 1 - beta * delta): a pair that is 1 / beta nats apart teaches nothing more.          arXiv:2309.06657

    Differs from the paper (and from SLiC, arXiv:2305.10425, whose loss it normalises): pairs come from the data, they
    are not drawn from an estimate of the optimal policy.
    """

    def of_deltas(self, delta_P: Tensor) -> Tensor:
        return torch.relu(1 - self.beta * delta_P)
