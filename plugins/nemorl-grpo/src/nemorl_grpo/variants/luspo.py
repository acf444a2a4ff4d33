"""LUSPO: GSPO whose responses count as often as they have tokens, so that short ones are not favoured.

arXiv:2602.05261. GSPO's mean over responses gives a token of a long one less gradient than a token of a short one, and
lengths shrink. Here every token has the same: loss = mean over responses of ``length * -surrogate``. The objective is
that of ``loss_gspo.py``; advantages are GRPO's.

Differs from the paper: std is the unbiased one; a KL penalty, summed over tokens, can be added.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from nemorl_rl.policy_gradient.trainer import PolicyGradientTrainer

from nemorl_grpo.variants.gspo import GSPOConfig

if TYPE_CHECKING:
    from nemorl_tensors import LossAggregation


class LUSPOConfig(GSPOConfig):
    """Length-unbiased sequence policy optimisation (arXiv:2602.05261)."""

    summary: ClassVar[str] = "GSPO without the bias towards short responses"
    trainer: ClassVar[str] = "nemorl_grpo.variants.luspo:LUSPOTrainer"

    algorithm: Literal["luspo"] = "luspo"  # type: ignore[assignment]
    """Name of the algorithm."""

    @property
    def averages_over(self) -> LossAggregation:
        return "sequence_sum"


class LUSPOTrainer(PolicyGradientTrainer[LUSPOConfig]):
    """Length-unbiased sequence policy optimisation (arXiv:2602.05261)."""

    config_class = LUSPOConfig
