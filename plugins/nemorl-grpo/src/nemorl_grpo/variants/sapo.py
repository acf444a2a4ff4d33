"""SAPO: tokens whose ratio has moved far lose their gradient gradually, sooner where the advantage is negative.

arXiv:2511.20347. The objective is in ``loss_sapo.py``; advantages are GRPO's, the average is over responses of their
own averages. Differs from the paper: std is the unbiased one; a KL penalty can be added.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from nemorl_rl.policy_gradient.config import PolicyGradientConfig
from nemorl_rl.policy_gradient.trainer import PolicyGradientTrainer
from pydantic import Field

from nemorl_grpo.config import GroupNormalization

if TYPE_CHECKING:
    from nemorl_tensors import LossAggregation

    from nemorl_grpo.loss_sapo import SoftGateLoss


class SAPOConfig(GroupNormalization, PolicyGradientConfig):
    """Soft adaptive policy optimisation (arXiv:2511.20347)."""

    summary: ClassVar[str] = "GRPO with a smooth gate in place of the clip"
    trainer: ClassVar[str] = "nemorl_grpo.variants.sapo:SAPOTrainer"

    algorithm: Literal["sapo"] = "sapo"
    """Name of the algorithm."""
    tau_positive: float = Field(1.0, gt=0)
    """How sharply the gate closes on tokens of positive advantage."""
    tau_negative: float = Field(1.05, gt=0)
    """The same for others. Above ``tau_positive``: what became unlikely is let go sooner, which is steadier."""
    leave_one_out: bool = False
    """Baseline and spread of a response come from the *other* responses of its group."""

    @property
    def averages_over(self) -> LossAggregation:
        return "sequence"

    def build_loss(self, **options: Any) -> SoftGateLoss:
        from nemorl_grpo.loss_sapo import SoftGateLoss

        return SoftGateLoss(self.tau_positive, self.tau_negative, **options)


class SAPOTrainer(PolicyGradientTrainer[SAPOConfig]):
    """Soft adaptive policy optimisation (arXiv:2511.20347)."""

    config_class = SAPOConfig
