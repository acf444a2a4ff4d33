"""Raw rewards: no baseline, no group, no critic. What a response earns is its advantage.

A_t = r                                                                  NeMo RL's estimator ``raw_reward``
A_t = (r - mean) / sqrt(max(var, 1e-8))      over all trained tokens of the step, with ``normalize_advantages``

The loss is PPO's clipped surrogate. Differs from ``reinforce_plus_plus``: the KL is a term of the loss, nothing need be
normalised, and a spread that is next to nothing still divides.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from nemorl.metrics import Metric
from nemorl.types import Samples
from nemorl_rl.policy_gradient.config import ClippedConfig, RewardShaping
from nemorl_rl.policy_gradient.rewards import shaped_rewards
from nemorl_rl.policy_gradient.trainer import PolicyGradientTrainer
from nemorl_rl.policy_gradient.updates import BatchTransform
from pydantic import Field

if TYPE_CHECKING:
    from nemorl_tensors import TokenBatch

SMALLEST_VARIANCE = 1e-8


class RawRewardConfig(RewardShaping, ClippedConfig):
    """Rewards as advantages, as NeMo RL's ``raw_reward``."""

    summary: ClassVar[str] = "The reward itself as advantage: no baseline, no groups, no critic"
    trainer: ClassVar[str] = "nemorl_grpo.variants.raw_reward:RawRewardTrainer"

    algorithm: Literal["raw_reward"] = "raw_reward"
    """Name of the algorithm."""
    num_generations_per_prompt: int = Field(16, ge=1)
    """Responses per prompt, each on its own."""
    normalize_advantages: bool = False
    """Give the advantages mean 0 and standard deviation 1 over all trained tokens of the batch."""


class RawRewardTrainer(PolicyGradientTrainer[RawRewardConfig]):
    """Rewards as advantages, as NeMo RL's ``raw_reward``."""

    config_class = RawRewardConfig

    def compute_advantages(self, samples: Samples) -> list[float]:
        return shaped_rewards(samples, self.config)

    def token_credit(self) -> list[BatchTransform]:
        normalization = [NormalizedRewards()] if self.config.normalize_advantages else []
        return [*normalization, *super().token_credit()]


@dataclass(frozen=True)
class NormalizedRewards:
    """Advantages with mean 0 and variance 1 over the trained tokens; a variance below 1e-8 counts as 1e-8."""

    requires: ClassVar[frozenset[str]] = frozenset({"advantages"})

    def __call__(self, batch: TokenBatch, samples: Samples) -> tuple[TokenBatch, dict[str, Metric]]:
        import torch

        trained = batch["advantages"][batch.mask].double()
        if trained.numel() == 0:
            return batch, {}
        spread = trained.var(correction=0).clamp(min=SMALLEST_VARIANCE).sqrt()
        normal = (batch["advantages"].double() - trained.mean()) / spread
        return batch.with_tokens(advantages=torch.where(batch.mask, normal, 0.0).float()), {}
