"""CISPO: clip the importance weight instead of the update, so that no token stops teaching.

arXiv:2506.13585 (MiniMax-M1). The objective is in ``loss_cispo.py``; advantages are GRPO's, the
average is over tokens.

Differs from the paper: std is the unbiased one; the cap, which the paper does not state, is 5 (arXiv:2510.13786 found 4
to 8 alike); dynamic sampling and the length penalty that it borrows from DAPO are knobs, off by default; a KL penalty
can be added.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from nemorl.types import Samples
from nemorl_rl.policy_gradient.config import GroupComparison, PolicyGradientConfig
from nemorl_rl.policy_gradient.kl import KLPenalty
from nemorl_rl.policy_gradient.trainer import PolicyGradientTrainer
from pydantic import Field

from nemorl_grpo.config import GroupNormalization
from nemorl_grpo.trainer import grpo_advantages

if TYPE_CHECKING:
    from nemorl_grpo.loss_cispo import CappedWeightLoss


class CISPOConfig(GroupNormalization, KLPenalty, GroupComparison, PolicyGradientConfig):
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
    kl_penalty: float = Field(0.0, ge=0)
    """Weight of KL(policy || initial policy). 0 needs no reference model."""


class CISPOTrainer(PolicyGradientTrainer[CISPOConfig]):
    """Clipped importance-sampling-weight policy optimisation (arXiv:2506.13585)."""

    config_class = CISPOConfig

    def compute_advantages(self, samples: Samples) -> list[float]:
        return grpo_advantages(samples, self.config)

    def build_loss(self) -> CappedWeightLoss:
        from nemorl_grpo.loss_cispo import CappedWeightLoss

        return CappedWeightLoss(self.config.ratio_cap, self.config.ratio_floor, **self.loss_options)
