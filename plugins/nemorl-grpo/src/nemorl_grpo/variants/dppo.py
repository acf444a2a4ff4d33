"""DPPO: a trust region of probabilities around the sampler, in place of the clipped ratio.

arXiv:2602.04879. A ratio of 2 is nothing for a token of probability 1e-5 and much for one of 0.4; PPO's clip treats
both alike. The objective is in ``loss_dppo.py``; advantages are GRPO's, the average is over tokens.

Differs from the paper: std is the unbiased one; a KL penalty can be added. With ``normalize_std: false`` and
``drift_penalty: 1.0e-3`` this is prime-rl's loss.
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

if TYPE_CHECKING:
    from nemorl_grpo.loss_dppo import DivergenceMaskLoss


class DPPOConfig(GroupNormalization, PolicyGradientConfig):
    """Divergence proximal policy optimisation (arXiv:2602.04879)."""

    summary: ClassVar[str] = "GRPO with a trust region of probabilities around the sampler"
    trainer: ClassVar[str] = "nemorl_grpo.variants.dppo:DPPOTrainer"

    metrics: ClassVar[Mapping[str, MetricInfo]] = {
        **PolicyGradientConfig.metrics,
        "train/masked_frac": MetricInfo(
            "Tokens outside the trust region",
            "share",
            "share of tokens that train nothing because their probability has moved too far",
            "growth: fewer updates per step, or a lower rate",
        ),
    }

    algorithm: Literal["dppo"] = "dppo"
    """Name of the algorithm."""
    divergence: Literal["tv", "kl"] = "tv"
    """Distance of policy and sampler at a token, of the token against all others. ``tv``: how far its probability has
    moved. ``kl``: in nats, which is stricter with probabilities close to 0 or 1; bounds of 0.05 are typical."""
    divergence_low: float = Field(0.2, ge=0)
    """Tokens that have become less likely by more no longer train where the advantage is negative."""
    divergence_high: float = Field(0.2, ge=0)
    """Tokens that have become likelier by more no longer train where the advantage is positive."""
    ratio_cap: float = Field(20.0, ge=1)
    """Largest weight of a token, policy over sampler. Keep it large: a small one biases the gradient."""
    drift_penalty: float = Field(0.0, ge=0)
    """Weight of the squared log ratio to the sampler, of all tokens (arXiv:2602.02276); prime-rl has 1e-3."""
    importance_correction: ImportanceCorrection | None = None
    """None: the ratio is that to the sampler, so there is nothing to correct."""
    leave_one_out: bool = False
    """Baseline and spread of a response come from the *other* responses of its group."""

    def problems(self) -> Iterator[ConfigIssue]:
        yield from super().problems()
        yield from corrected_twice(self.importance_correction)

    def build_loss(self, **options: Any) -> DivergenceMaskLoss:
        from nemorl_grpo.loss_dppo import DivergenceMaskLoss

        bounds = self.divergence, self.divergence_low, self.divergence_high, self.ratio_cap
        return DivergenceMaskLoss(*bounds, self.drift_penalty, **options)


class DPPOTrainer(PolicyGradientTrainer[DPPOConfig]):
    """Divergence proximal policy optimisation (arXiv:2602.04879)."""

    config_class = DPPOConfig


def corrected_twice(correction: ImportanceCorrection | None) -> Iterator[ConfigIssue]:
    """A correction beside a loss whose own ratio is that to the sampler."""
    if correction is not None:
        message = "the loss weighs tokens by policy over sampler already: the sampler would be corrected twice"
        yield ConfigIssue("importance_correction", message, "leave it out")
