"""MaxRL: the likelihood of a right answer instead of its expectation, so that hard prompts weigh more.

arXiv:2602.02710. Dividing by the success rate p turns the gradient of p into that of log p, as far as a group can tell.

A_i = (r_i - mean(group)) / mean(group)

Differs from the paper: rewards need not be 0 or 1, only not negative; the average over tokens is that of
``loss_aggregation``; with several updates per step the ratio is clipped as in GRPO. A group without any reward teaches
nothing, as there.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import ClassVar, Literal

from nemorl.errors import UsageError
from nemorl.types import Samples
from nemorl_rl.policy_gradient.advantages import EPSILON
from nemorl_rl.policy_gradient.config import ClippedConfig, RewardShaping
from nemorl_rl.policy_gradient.rewards import shaped_rewards
from nemorl_rl.policy_gradient.trainer import PolicyGradientTrainer
from pydantic import Field


class MaxRLConfig(RewardShaping, ClippedConfig):
    """Maximum likelihood reinforcement learning (arXiv:2602.02710)."""

    summary: ClassVar[str] = "GRPO that divides by the group's mean reward: hard prompts weigh more"
    trainer: ClassVar[str] = "nemorl_grpo.variants.maxrl:MaxRLTrainer"

    algorithm: Literal["maxrl"] = "maxrl"
    """Name of the algorithm."""
    kl_penalty: float = Field(0.0, ge=0)
    """Weight of KL(policy || initial policy). 0 needs no reference model."""


class MaxRLTrainer(PolicyGradientTrainer[MaxRLConfig]):
    """Maximum likelihood reinforcement learning (arXiv:2602.02710)."""

    config_class = MaxRLConfig

    def compute_advantages(self, samples: Samples) -> list[float]:
        rewards = shaped_rewards(samples, self.config)
        if min(rewards) < 0:
            raise UsageError(
                f"MaxRL divides by the mean reward of a group, and a reward is {min(rewards):g}",
                fix="map rewards to what is not negative, e.g. reward_scaling: {source_min: -1}, or use grpo",
            )
        return mean_normalized(rewards, samples.group_ids)


def mean_normalized(rewards: Sequence[float], group_ids: Sequence[int]) -> list[float]:
    """How many times its group's mean a reward is above it.

    A_i = (r_i - mean) / mean                                    MaxRL, arXiv:2602.02710

    Args:
        rewards: One per response, none negative.
        group_ids: Prompt index of each response, same order.

    Returns:
        One advantage per response, in input order; zeros where the mean is 0 or all rewards are equal.
    """
    groups: dict[int, list[float]] = defaultdict(list)
    for reward, group in zip(rewards, group_ids, strict=True):
        groups[group].append(reward)
    means = {group: math.fsum(values) / len(values) for group, values in groups.items()}
    return [
        (reward - means[group]) / means[group] if means[group] > EPSILON else 0.0
        for reward, group in zip(rewards, group_ids, strict=True)
    ]
