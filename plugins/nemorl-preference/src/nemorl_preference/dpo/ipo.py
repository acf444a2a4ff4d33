"""The loss of identity preference optimisation.

# P = pairs
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from nemorl_preference.dpo.preference import PreferenceLoss


@dataclass(frozen=True)
class IPOLoss(PreferenceLoss):
    """(delta - 1 / (2 * beta))^2: pairs are pulled to a fixed distance, not pushed apart for ever.    arXiv:2310.12036

    ``beta`` is the paper's tau.
    Differs from the paper: with ``average`` (the default of the algorithm) delta is per token. The paper does not say
    so, but its authors' experiments do it; sums would make the target depend on the lengths of responses.
    """

    def of_deltas(self, delta_P: Tensor) -> Tensor:
        return (delta_P - 1 / (2 * self.beta)).square()
