"""VESPO: whole responses weigh less the further the policy is from the sampler, smoothly and without a bound on length.

arXiv:2602.10693. The objective is in ``loss_vespo.py``; advantages are GRPO's, the average is over tokens.

Differs from the paper: std is the unbiased one; a KL penalty can be added.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from nemorl.errors import ConfigIssue
from nemorl.metrics import MetricInfo
from nemorl_rl.policy_gradient.config import ImportanceCorrection, PolicyGradientConfig
from nemorl_rl.policy_gradient.trainer import PolicyGradientTrainer
from pydantic import Field

from nemorl_grpo.config import GroupNormalization
from nemorl_grpo.variants.dppo import corrected_twice

if TYPE_CHECKING:
    from nemorl_grpo.loss_vespo import GammaWeightLoss


class VESPOConfig(GroupNormalization, PolicyGradientConfig):
    """Variational sequence-level soft policy optimisation (arXiv:2602.10693)."""

    summary: ClassVar[str] = "REINFORCE with a smooth weight of responses, for samples of other weights"
    trainer: ClassVar[str] = "nemorl_grpo.variants.vespo:VESPOTrainer"

    metrics: ClassVar[Mapping[str, MetricInfo]] = {
        **PolicyGradientConfig.metrics,
        "train/response_weight": MetricInfo(
            "Weight of responses",
            meaning="mean weight of a token's response, 1 where policy and sampler agree",
            watch_for="a fall to 0: the samples are too old to teach",
        ),
    }

    algorithm: Literal["vespo"] = "vespo"
    """Name of the algorithm."""
    k_positive: float = Field(2.0, ge=0)
    """How fast a response of positive advantage loses weight where the policy finds it less likely than the sampler."""
    lambda_positive: float = Field(3.0, gt=0)
    """How fast one of positive advantage loses weight where the policy finds it likelier."""
    k_negative: float = Field(3.0, ge=0)
    """``k_positive`` of negative advantages."""
    lambda_negative: float = Field(2.0, gt=0)
    """``lambda_positive`` of negative advantages."""
    importance_correction: ImportanceCorrection | None = None
    """None: the weight is that against the sampler, so there is nothing to correct."""
    leave_one_out: bool = False
    """Baseline and spread of a response come from the *other* responses of its group."""

    def problems(self) -> Iterator[ConfigIssue]:
        yield from super().problems()
        yield from corrected_twice(self.importance_correction)

    def build_loss(self, **options: Any) -> GammaWeightLoss:
        from nemorl_grpo.loss_vespo import GammaWeightLoss

        kernels = self.k_positive, self.lambda_positive, self.k_negative, self.lambda_negative
        return GammaWeightLoss(*kernels, **options)


class VESPOTrainer(PolicyGradientTrainer[VESPOConfig]):
    """Variational sequence-level soft policy optimisation (arXiv:2602.10693)."""

    config_class = VESPOConfig
