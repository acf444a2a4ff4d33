"""DRO: a square of the log ratio in place of ratio and clip, for samples of which there is no other control.

arXiv:2405.19107. The objective is in ``loss_dro.py``; advantages are GRPO's, the average is over tokens.

Differs from the paper: the baseline is a group and not a learned value; see also the loss.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from nemorl_rl.policy_gradient.config import PolicyGradientConfig
from nemorl_rl.policy_gradient.trainer import PolicyGradientTrainer
from pydantic import Field

from nemorl_grpo.config import GroupNormalization

if TYPE_CHECKING:
    from nemorl_grpo.loss_dro import QuadraticDriftLoss


class DROConfig(GroupNormalization, PolicyGradientConfig):
    """Direct reward optimisation (arXiv:2405.19107)."""

    summary: ClassVar[str] = "REINFORCE with a square that holds the policy near the old one"
    trainer: ClassVar[str] = "nemorl_grpo.variants.dro:DROTrainer"

    algorithm: Literal["dro"] = "dro"
    """Name of the algorithm."""
    drift_penalty: float = Field(0.1, gt=0)
    """Weight of half the squared log ratio to the policy before the step. No effect with a single update per step."""
    leave_one_out: bool = False
    """Baseline and spread of a response come from the *other* responses of its group."""

    def build_loss(self, **options: Any) -> QuadraticDriftLoss:
        from nemorl_grpo.loss_dro import QuadraticDriftLoss

        return QuadraticDriftLoss(self.drift_penalty, **options)


class DROTrainer(PolicyGradientTrainer[DROConfig]):
    """Direct reward optimisation (arXiv:2405.19107)."""

    config_class = DROConfig
