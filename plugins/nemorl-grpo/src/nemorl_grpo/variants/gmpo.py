"""GMPO: the geometric mean of token ratios, each clipped on its own, so that one token far off decides nothing.

arXiv:2507.20673. The objective is in ``loss_gmpo.py``; advantages are GRPO's, the average is over responses.

Differs from the paper: std is the unbiased one; a KL penalty can be added.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from nemorl_rl.policy_gradient.trainer import PolicyGradientTrainer
from pydantic import Field

from nemorl_grpo.variants.gspo import GSPOConfig

if TYPE_CHECKING:
    from nemorl_grpo.loss_gmpo import GeometricMeanLoss


class GMPOConfig(GSPOConfig):
    """Geometric-mean policy optimisation (arXiv:2507.20673)."""

    summary: ClassVar[str] = "GRPO with the geometric mean of clipped ratios per response"
    trainer: ClassVar[str] = "nemorl_grpo.variants.gmpo:GMPOTrainer"

    algorithm: Literal["gmpo"] = "gmpo"  # type: ignore[assignment]
    """Name of the algorithm."""
    weighs_whole_responses: ClassVar[bool] = True
    clip_low: float = Field(0.4, ge=0)
    """The log ratio of a token is clipped below at minus this, in nats."""
    clip_high: float = Field(0.4, ge=0)
    """The log ratio of a token is clipped above at this, in nats."""

    def build_loss(self, **options: Any) -> GeometricMeanLoss:
        from nemorl_grpo.loss_gmpo import GeometricMeanLoss

        return GeometricMeanLoss(self.clip_low, self.clip_high, **options)


class GMPOTrainer(PolicyGradientTrainer[GMPOConfig]):
    """Geometric-mean policy optimisation (arXiv:2507.20673)."""

    config_class = GMPOConfig
