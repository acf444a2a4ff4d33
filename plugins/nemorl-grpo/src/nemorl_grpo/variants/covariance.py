"""Clip-Cov and KL-Cov: GRPO that keeps its entropy, by treating the few tokens apart that would cost most of it.

arXiv:2505.22617. The choice of tokens is in ``covariant.py``, the objectives are in ``loss_clip_cov.py`` and
``loss_kl_cov.py``. Advantages are GRPO's, the average is over tokens. The choice needs the old policy's log-probs: one
more forward pass than GRPO.

Differs from the paper: tokens are chosen once a step; std is the unbiased one; a KL penalty can be added.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from nemorl.errors import ConfigIssue
from nemorl.metrics import MetricInfo
from nemorl_rl.policy_gradient.config import ClippedConfig, PolicyGradientConfig
from nemorl_rl.policy_gradient.trainer import PolicyGradientTrainer
from nemorl_rl.policy_gradient.updates import BatchTransform
from pydantic import Field

from nemorl_grpo.config import GroupNormalization

if TYPE_CHECKING:
    from nemorl_grpo.loss_clip_cov import ClipCovLoss
    from nemorl_grpo.loss_kl_cov import KLCovLoss


COVARIANT = {
    "train/covariant_frac": MetricInfo(
        "Covariant tokens",
        "share",
        "share of tokens chosen because they would cost much entropy",
        "0: none in the band",
    )
}


class ClipCovConfig(GroupNormalization, ClippedConfig):
    """Clip-Cov (arXiv:2505.22617)."""

    summary: ClassVar[str] = "GRPO that leaves out a few tokens which would cost most of the entropy"
    trainer: ClassVar[str] = "nemorl_grpo.variants.covariance:ClipCovTrainer"
    metrics: ClassVar[Mapping[str, MetricInfo]] = {**PolicyGradientConfig.metrics, **COVARIANT}

    algorithm: Literal["clip_cov"] = "clip_cov"
    """Name of the algorithm."""
    cov_fraction: float = Field(2e-4, gt=0, le=1)
    """Share of the batch's tokens that train nothing, one at least."""
    cov_low: float = 1.0
    """They are drawn from tokens whose covariance of advantage and log-prob is above this, and"""
    cov_high: float = 5.0
    """below this."""
    kl_penalty: float = Field(0.0, ge=0)
    """Weight of KL(policy || initial policy). 0 needs no reference model."""
    leave_one_out: bool = False
    """Baseline and spread of a response come from the *other* responses of its group."""

    def problems(self) -> Iterator[ConfigIssue]:
        yield from super().problems()
        if self.cov_low >= self.cov_high:
            yield ConfigIssue("cov_low", f"{self.cov_low:g} is not below cov_high = {self.cov_high:g}", "swap them")

    def build_loss(self, **options: Any) -> ClipCovLoss:
        from nemorl_grpo.loss_clip_cov import ClipCovLoss

        return ClipCovLoss(**self.ratio_options, **options)


class ClipCovTrainer(PolicyGradientTrainer[ClipCovConfig]):
    """Clip-Cov (arXiv:2505.22617)."""

    config_class = ClipCovConfig

    def token_credit(self) -> list[BatchTransform]:
        from nemorl_grpo.covariant import MarkCovariant, RandomInBand

        config = self.config
        choice = RandomInBand(config.cov_fraction, config.cov_low, config.cov_high)
        return [*super().token_credit(), MarkCovariant(choice)]


class KLCovConfig(GroupNormalization, PolicyGradientConfig):
    """KL-Cov (arXiv:2505.22617)."""

    summary: ClassVar[str] = "GRPO without a clip that holds back the tokens which would cost most of the entropy"
    trainer: ClassVar[str] = "nemorl_grpo.variants.covariance:KLCovTrainer"
    metrics: ClassVar[Mapping[str, MetricInfo]] = {**PolicyGradientConfig.metrics, **COVARIANT}

    algorithm: Literal["kl_cov"] = "kl_cov"
    """Name of the algorithm."""
    cov_fraction: float = Field(2e-4, gt=0, le=1)
    """Share of the batch's tokens that are held back: those of the highest covariance of advantage and log-prob."""
    cov_penalty: float = Field(1.0, gt=0)
    """What a nat between policy and old policy costs such a token. No effect with a single update per step."""
    leave_one_out: bool = False
    """Baseline and spread of a response come from the *other* responses of its group."""

    def build_loss(self, **options: Any) -> KLCovLoss:
        from nemorl_grpo.loss_kl_cov import KLCovLoss

        return KLCovLoss(self.cov_penalty, **options)


class KLCovTrainer(PolicyGradientTrainer[KLCovConfig]):
    """KL-Cov (arXiv:2505.22617)."""

    config_class = KLCovConfig

    def token_credit(self) -> list[BatchTransform]:
        from nemorl_grpo.covariant import Highest, MarkCovariant

        return [*super().token_credit(), MarkCovariant(Highest(self.config.cov_fraction))]
