"""RLOO: REINFORCE whose baseline is the mean reward of the other responses to the prompt.

arXiv:2402.14740.

A_i = r_i - mean of the other rewards of its group

Differs from the paper: it sums log-probs over a response, here they are averaged over all tokens of the step (one
common factor) or, with ``loss_aggregation: sequence``, within each response first. Its KL is part of the reward
(``kl_in: reward``); by default here it is a term of the loss, with the estimator k2, whose gradient is that of charging
each token's KL to its own reward. With several updates per step the ratio is clipped as in GRPO; with one, this is
plain REINFORCE.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from nemorl.types import Samples
from nemorl_rl.kl import KLType

from nemorl_grpo.advantages import group_advantages
from nemorl_grpo.config import ClippedConfig, RewardShaping
from nemorl_grpo.rewards import shaped_rewards
from nemorl_grpo.trainer import ClippedTrainer


class RLOOConfig(RewardShaping, ClippedConfig):
    """REINFORCE with a leave-one-out baseline (arXiv:2402.14740)."""

    summary: ClassVar[str] = "REINFORCE against the mean reward of the other responses"
    trainer: ClassVar[str] = "nemorl_grpo.variants.rloo:RLOOTrainer"

    algorithm: Literal["rloo"] = "rloo"
    """Name of the algorithm."""
    loss_estimator: ClassVar[KLType] = "k2"


class RLOOTrainer(ClippedTrainer[RLOOConfig]):
    """REINFORCE with a leave-one-out baseline (arXiv:2402.14740)."""

    config_class = RLOOConfig

    def credit(self, samples: Samples) -> list[float]:
        rewards = shaped_rewards(samples, self.config)
        return group_advantages(rewards, samples.group_ids, normalize_std=False, leave_one_out=True)
