"""REINFORCE++: no groups; rewards less the KL from the initial policy, normalised over the tokens of the batch.

arXiv:2501.03262.

return_t = r - kl_penalty * sum over s >= t of (old_logprob_s - reference_logprob_s)              eq. 8 and 9
A_t = (return_t - mean) / (std + 1e-6)      over all trained tokens of the step                   eq. 10

The loss is PPO's clipped surrogate. With a KL penalty, the old log-probs are needed even when there is one update per
step: one more forward pass than GRPO.

Differs from the paper: several responses to a prompt are allowed (and are GRPO's 16 by default), each on its own. NeMo
RL charges a token its own KL only; the paper, and this, also that of all tokens after it. The metrics ``advantages/*``
are rewards before KL and normalisation, which happen per token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from nemorl.types import Samples
from nemorl_rl.kl import KLCharge
from pydantic import Field

from nemorl_grpo.config import ClippedRatio, PolicyGradientConfig, RewardShaping
from nemorl_grpo.rewards import shaped_rewards
from nemorl_grpo.trainer import PolicyGradientTrainer

if TYPE_CHECKING:
    from nemorl_tensors import LossAggregation, TokenBatch


class ReinforcePlusPlusConfig(RewardShaping, ClippedRatio, KLCharge, PolicyGradientConfig):
    """REINFORCE with PPO's clipping, a KL in the reward and batch normalisation (arXiv:2501.03262)."""

    summary: ClassVar[str] = "REINFORCE with a KL in the reward and advantages normalised over the batch"
    trainer: ClassVar[str] = "nemorl_grpo.variants.reinforce_plus_plus:ReinforcePlusPlusTrainer"

    algorithm: Literal["reinforce_plus_plus"] = "reinforce_plus_plus"
    """Name of the algorithm."""
    kl_penalty: float = Field(0.01, ge=0)
    """How much of the reward a nat of KL(policy || initial policy) costs. 0 needs no reference model."""
    loss_aggregation: Literal["token", "sequence"] = "token"
    """Average over all response tokens, or over responses of their own averages."""


class ReinforcePlusPlusTrainer(PolicyGradientTrainer[ReinforcePlusPlusConfig]):
    """REINFORCE with PPO's clipping, a KL in the reward and batch normalisation (arXiv:2501.03262)."""

    config_class = ReinforcePlusPlusConfig

    def setup(self) -> None:
        from nemorl_grpo.loss import ClippedPolicyGradientLoss

        config = self.config
        self.loss = ClippedPolicyGradientLoss(
            config.clip_low,
            config.clip_high,
            config.dual_clip,
            **self.loss_settings,
        )

    @property
    def needs_old_logprobs(self) -> bool:
        """The KL that is charged to the reward is theirs."""
        return super().needs_old_logprobs or self.config.needs_reference

    def advantages(self, samples: Samples) -> list[float]:
        return shaped_rewards(samples, self.config)

    @property
    def loss_aggregation(self) -> LossAggregation:
        return self.config.loss_aggregation

    def credit_tokens(self, batch: TokenBatch, samples: Samples) -> TokenBatch:
        from nemorl_tensors import standardized

        from nemorl_grpo.token_credit import kl_to_go

        config, returns = self.config, batch["advantages"]
        if config.needs_reference:
            kl = config.kl_term().estimate(batch["old_logprobs"], batch["reference_logprobs"], batch.mask)
            returns = returns - config.kl_penalty * kl_to_go(kl, batch.mask, batch.lengths)
            batch = batch.with_tokens(kl=kl)
        return batch.with_tokens(advantages=standardized(returns, batch.mask, unbiased=False))
