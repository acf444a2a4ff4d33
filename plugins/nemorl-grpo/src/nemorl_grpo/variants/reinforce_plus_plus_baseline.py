"""REINFORCE++-baseline: rewards against their group's mean, scaled by the spread of the whole batch.

arXiv:2501.03262. One spread for all prompts: a group whose rewards hardly differ is not blown up as it is by its own in
GRPO.

A_i = (r_i - mean(group) - batch mean) / (batch std + 1e-6)      over the trained tokens of the step

Differs from the paper: not at all in the credit. The KL is the loss term with the estimator k2 that it recommends.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from nemorl.types import Samples
from nemorl_rl.kl import KLType

from nemorl_grpo.advantages import batch_normalized, group_advantages
from nemorl_grpo.config import ClippedConfig, RewardShaping
from nemorl_grpo.rewards import shaped_rewards
from nemorl_grpo.trainer import ClippedTrainer


class ReinforcePlusPlusBaselineConfig(RewardShaping, ClippedConfig):
    """REINFORCE++ with the group's mean as baseline (arXiv:2501.03262)."""

    summary: ClassVar[str] = "Rewards against their group's mean, scaled by the spread of the batch"
    trainer: ClassVar[str] = "nemorl_grpo.variants.reinforce_plus_plus_baseline:ReinforcePlusPlusBaselineTrainer"

    algorithm: Literal["reinforce_plus_plus_baseline"] = "reinforce_plus_plus_baseline"
    """Name of the algorithm."""
    loss_estimator: ClassVar[KLType] = "k2"


class ReinforcePlusPlusBaselineTrainer(ClippedTrainer[ReinforcePlusPlusBaselineConfig]):
    """REINFORCE++ with the group's mean as baseline (arXiv:2501.03262)."""

    config_class = ReinforcePlusPlusBaselineConfig

    def credit(self, samples: Samples) -> list[float]:
        rewards = shaped_rewards(samples, self.config)
        centred = group_advantages(rewards, samples.group_ids, normalize_std=False, leave_one_out=False)
        tokens = [0 if self.is_dropped(sample) else sample.response_tokens for sample in samples]
        return batch_normalized(centred, tokens)
