"""REINFORCE++: no groups; rewards less the KL from the initial policy, normalised over the tokens of the batch.

arXiv:2501.03262.

return_t = r - kl_penalty * sum over s >= t of (old_logprob_s - reference_logprob_s)              eq. 8 and 9
A_t = (return_t - mean) / (std + 1e-6)      over all trained tokens of the step                   eq. 10

The loss is PPO's clipped surrogate. With a KL penalty, the old log-probs are needed even when there is one update per
step: one more forward pass than GRPO.

Differs from the paper: several responses to a prompt are allowed (and are GRPO's 16 by default), each on its own. NeMo
RL charges a token its own KL only; the paper, and this, also that of all tokens after it. The KL can be a term of the
loss instead (``kl_in: loss``). The metrics ``advantages/*`` are rewards before KL and normalisation, which happen per
token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from nemorl.metrics import Metric
from nemorl.types import Samples
from nemorl_rl.policy_gradient.config import ClippedRatio, PolicyGradientConfig, RewardShaping
from nemorl_rl.policy_gradient.rewards import shaped_rewards
from nemorl_rl.policy_gradient.trainer import PolicyGradientTrainer
from nemorl_rl.policy_gradient.updates import BatchTransform
from pydantic import Field

if TYPE_CHECKING:
    from nemorl_tensors import KLTerm, LossAggregation, TokenBatch


class ReinforcePlusPlusConfig(RewardShaping, ClippedRatio, PolicyGradientConfig):
    """REINFORCE with PPO's clipping, a KL in the reward and batch normalisation (arXiv:2501.03262)."""

    summary: ClassVar[str] = "REINFORCE with a KL in the reward and advantages normalised over the batch"
    trainer: ClassVar[str] = "nemorl_grpo.variants.reinforce_plus_plus:ReinforcePlusPlusTrainer"

    algorithm: Literal["reinforce_plus_plus"] = "reinforce_plus_plus"
    """Name of the algorithm."""
    num_generations_per_prompt: int = Field(16, ge=1)
    """Responses per prompt, each on its own."""
    advantage_clip_low: float | None = None
    """Rewards below are raised to this, before the KL and the normalisation."""
    advantage_clip_high: float | None = None
    """Rewards above are lowered to this, before the KL and the normalisation."""
    kl_penalty: float = Field(0.01, ge=0)
    """How much of the reward a nat of KL(policy || initial policy) costs. 0 needs no reference model."""
    kl_in: Literal["loss", "reward"] = "reward"
    """Where it is charged. ``reward``: at the token that departs and those before it. ``loss``: a term of its own."""
    loss_aggregation: Literal["token", "sequence"] | None = None
    """Average over all response tokens, or over responses of their own averages. Unset: ``token``; for agents
    ``sequence``, where an episode counts once however often it forks."""

    @property
    def averages_over(self) -> LossAggregation | None:
        return self.loss_aggregation


class ReinforcePlusPlusTrainer(PolicyGradientTrainer[ReinforcePlusPlusConfig]):
    """REINFORCE with PPO's clipping, a KL in the reward and batch normalisation (arXiv:2501.03262)."""

    config_class = ReinforcePlusPlusConfig

    def compute_advantages(self, samples: Samples) -> list[float]:
        return shaped_rewards(samples, self.config)

    def token_credit(self) -> list[BatchTransform]:
        return [NormalizedReturns(self.config.reward_kl_penalty, self.config.kl_term())]


@dataclass(frozen=True)
class NormalizedReturns:
    """Rewards less the KL from each token on, normalised over the trained tokens of the batch (eq. 8 to 10)."""

    kl_penalty: float
    """How much of the reward a nat costs."""
    term: KLTerm

    @property
    def requires(self) -> frozenset[str]:
        charged = {"old_logprobs", "reference_logprobs"} if self.kl_penalty > 0 else set[str]()
        return frozenset({"advantages", *charged})

    def __call__(self, batch: TokenBatch, samples: Samples) -> tuple[TokenBatch, dict[str, Metric]]:
        from nemorl_rl.policy_gradient.kl_charge import kl_to_go, with_kl
        from nemorl_tensors import standardized

        returns = batch["advantages"]
        if self.kl_penalty > 0:
            batch = with_kl(batch, self.term)
            returns = returns - self.kl_penalty * kl_to_go(batch["kl"], batch.mask, batch.lengths)
        return batch.with_tokens(advantages=standardized(returns, batch.mask, unbiased=False)), {}
