"""MaxRL: the likelihood of a right answer instead of its expectation, so that hard prompts weigh more.

arXiv:2602.02710. Dividing by the success rate p turns the gradient of p into that of log p, as far as a group can tell.

A_i = (r_i - mean(group)) / mean(group)

Differs from the paper: rewards need not be 0 or 1, only not negative; the average over tokens is that of
``loss_aggregation``; with several updates per step the ratio is clipped as in GRPO. A group without any reward teaches
nothing, as there.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from nemorl.errors import UsageError
from nemorl.types import Samples
from pydantic import Field

from nemorl_grpo.advantages import mean_normalized
from nemorl_grpo.config import ClippedConfig, RewardShaping
from nemorl_grpo.rewards import shaped_rewards
from nemorl_grpo.trainer import ClippedTrainer


class MaxRLConfig(RewardShaping, ClippedConfig):
    """Maximum likelihood reinforcement learning (arXiv:2602.02710)."""

    summary: ClassVar[str] = "GRPO that divides by the group's mean reward: hard prompts weigh more"
    trainer: ClassVar[str] = "nemorl_grpo.variants.maxrl:MaxRLTrainer"

    algorithm: Literal["maxrl"] = "maxrl"
    """Name of the algorithm."""
    kl_penalty: float = Field(0.0, ge=0)
    """Weight of KL(policy || initial policy). 0 needs no reference model."""


class MaxRLTrainer(ClippedTrainer[MaxRLConfig]):
    """Maximum likelihood reinforcement learning (arXiv:2602.02710)."""

    config_class = MaxRLConfig

    def credit(self, samples: Samples) -> list[float]:
        rewards = shaped_rewards(samples, self.config)
        if min(rewards) < 0:
            raise UsageError(
                f"MaxRL divides by the mean reward of a group, and a reward is {min(rewards):g}",
                fix="map rewards to what is not negative, e.g. reward_scaling: {source_min: -1}, or use grpo",
            )
        return mean_normalized(rewards, samples.group_ids)
