"""CISPO: clip the importance weight instead of the update, so that no token stops teaching.

arXiv:2506.13585 (MiniMax-M1). The objective is in ``loss_cispo.py``; advantages are GRPO's, the
average is over tokens.

Differs from the paper: std is the unbiased one; the cap, which the paper does not state, is 5 (arXiv:2510.13786 found 4
to 8 alike); dynamic sampling and the length penalty that it borrows from DAPO are knobs, off by default; a KL penalty
can be added.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from nemorl_rl.policy_gradient.config import PolicyGradientConfig
from nemorl_rl.policy_gradient.trainer import PolicyGradientTrainer
from pydantic import Field

from nemorl_grpo.config import GroupNormalization

if TYPE_CHECKING:
    from nemorl_grpo.loss_cispo import CappedWeightLoss


class CISPOConfig(GroupNormalization, PolicyGradientConfig):
    """Clipped importance-sampling-weight policy optimisation (arXiv:2506.13585)."""

    summary: ClassVar[str] = "REINFORCE with capped importance weights: every token keeps its gradient"
    trainer: ClassVar[str] = "nemorl_grpo.variants.cispo:CISPOTrainer"

    algorithm: Literal["cispo"] = "cispo"
    """Name of the algorithm."""
    ratio_cap: float = Field(5.0, ge=1)
    """Largest weight of a token, policy over old policy. No effect with a single update per step."""
    ratio_floor: float = Field(0.0, ge=0, le=1)
    """Smallest weight of a token. Above 0, tokens that have become unlikely keep more of their gradient."""
    leave_one_out: bool = False
    """Baseline and spread of a response come from the *other* responses of its group."""

    def build_loss(self, **options: Any) -> CappedWeightLoss:
        from nemorl_grpo.loss_cispo import CappedWeightLoss

        return CappedWeightLoss(self.ratio_cap, self.ratio_floor, **options)


class CISPOTrainer(PolicyGradientTrainer[CISPOConfig]):
    """Clipped importance-sampling-weight policy optimisation (arXiv:2506.13585)."""

    config_class = CISPOConfig
