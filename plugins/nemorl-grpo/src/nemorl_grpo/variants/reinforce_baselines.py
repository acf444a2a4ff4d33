"""REINFORCE against the mean reward of the responses to the same prompt: RLOO and REINFORCE++-baseline.

RLOO, arXiv:2402.14740. The mean is that of the *other* responses.

A_i = r_i - mean of the other rewards of its group

REINFORCE++-baseline, arXiv:2501.03262. One spread for all prompts: a group whose rewards hardly differ is not blown up
as it is by its own in GRPO.

A_i = (r_i - mean(group) - batch mean) / (batch std + 1e-6)      over the trained tokens of the step

Differs from the papers: RLOO sums log-probs over a response, here they are averaged over all tokens of the step (one
common factor) or, with ``loss_aggregation: sequence``, within each response first. Its KL is part of the reward
(``kl_in: reward``); by default here it is a term of the loss, with the estimator k2 that REINFORCE++ recommends, whose
gradient is that of charging each token's KL to its own reward. With several updates per step the ratio is clipped as in
GRPO; with one, both are plain REINFORCE.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from nemorl.types import Samples
from nemorl_rl.policy_gradient.advantages import batch_normalized, group_advantages
from nemorl_rl.policy_gradient.config import ClippedConfig, RewardShaping
from nemorl_rl.policy_gradient.rewards import shaped_rewards
from nemorl_rl.policy_gradient.trainer import PolicyGradientTrainer
from nemorl_rl.policy_gradient.updates_config import KLType


class RLOOConfig(RewardShaping, ClippedConfig):
    """REINFORCE with a leave-one-out baseline (arXiv:2402.14740)."""

    summary: ClassVar[str] = "REINFORCE against the mean reward of the other responses"
    trainer: ClassVar[str] = "nemorl_grpo.variants.reinforce_baselines:RLOOTrainer"

    algorithm: Literal["rloo"] = "rloo"
    """Name of the algorithm."""
    loss_estimator: ClassVar[KLType] = "k2"

    @property
    def is_linear_in_rewards(self) -> bool:
        return True


class RLOOTrainer(PolicyGradientTrainer[RLOOConfig]):
    """REINFORCE with a leave-one-out baseline (arXiv:2402.14740)."""

    config_class = RLOOConfig

    def compute_advantages(self, samples: Samples) -> list[float]:
        rewards = shaped_rewards(samples, self.config)
        return group_advantages(rewards, samples.group_ids, normalize_std=False, leave_one_out=True)


class ReinforcePlusPlusBaselineConfig(RewardShaping, ClippedConfig):
    """REINFORCE++ with the group's mean as baseline (arXiv:2501.03262)."""

    summary: ClassVar[str] = "Rewards against their group's mean, scaled by the spread of the batch"
    trainer: ClassVar[str] = "nemorl_grpo.variants.reinforce_baselines:ReinforcePlusPlusBaselineTrainer"

    algorithm: Literal["reinforce_plus_plus_baseline"] = "reinforce_plus_plus_baseline"
    """Name of the algorithm."""
    loss_estimator: ClassVar[KLType] = "k2"


class ReinforcePlusPlusBaselineTrainer(PolicyGradientTrainer[ReinforcePlusPlusBaselineConfig]):
    """REINFORCE++ with the group's mean as baseline (arXiv:2501.03262)."""

    config_class = ReinforcePlusPlusBaselineConfig

    def compute_advantages(self, samples: Samples) -> list[float]:
        rewards = shaped_rewards(samples, self.config)
        centred = group_advantages(rewards, samples.group_ids, normalize_std=False, leave_one_out=False)
        tokens = [0 if drops else s.response_tokens for drops, s in zip(self.dropped(samples), samples, strict=True)]
        return batch_normalized(centred, tokens)
