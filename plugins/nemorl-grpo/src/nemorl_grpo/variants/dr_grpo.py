"""Dr. GRPO: GRPO without the two divisions that bias it, by the spread of a group and by the length of a response.

arXiv:2503.20783.

A_i = r_i - mean(group)
loss = -1 / (S * L) * sum over responses i and tokens t of surrogate_t(A_i),   S responses, L a constant

How the constant maps to ``loss_weights``, which sum to 1 over an optimizer step: at level ``sequence`` they are
1 / (S * t_i) for the t_i tokens of response i. The surrogate is linear in the advantage (A_i >= 0 or < 0 decides which
bound applies, and a positive factor does not change that), so scaling A_i by t_i / L gives each token 1 / (S * L).

Differs from the paper: L is ``generation.max_new_tokens`` times ``max_turns``, the longest response there can be (the
paper's code takes the generation limit too); with ``overlong_filtering``, S counts the responses that train. There is
no KL penalty, as in the paper's experiments.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

from nemorl.types import Samples
from nemorl_rl.policy_gradient.advantages import group_advantages
from nemorl_rl.policy_gradient.config import ClippedRatio, PolicyGradientConfig, RewardShaping
from nemorl_rl.policy_gradient.rewards import shaped_rewards
from nemorl_rl.policy_gradient.trainer import PolicyGradientTrainer
from pydantic import Field

if TYPE_CHECKING:
    from nemorl_tensors import LossAggregation, TokenBatch


class DrGRPOConfig(RewardShaping, ClippedRatio, PolicyGradientConfig):
    """GRPO done right (arXiv:2503.20783): no division by a group's spread nor by a response's length."""

    summary: ClassVar[str] = "GRPO without the biases of dividing by spread and length"
    trainer: ClassVar[str] = "nemorl_grpo.variants.dr_grpo:DrGRPOTrainer"

    algorithm: Literal["dr_grpo"] = "dr_grpo"
    """Name of the algorithm."""
    kl_penalty: float = Field(0.0, ge=0, le=0)
    """0: there is no KL from the initial policy, whose weight would depend on the length of responses."""

    @property
    def averages_over(self) -> LossAggregation:
        return "sequence"

    @property
    def is_linear_in_rewards(self) -> bool:
        return True


class DrGRPOTrainer(PolicyGradientTrainer[DrGRPOConfig]):
    """GRPO done right (arXiv:2503.20783)."""

    config_class = DrGRPOConfig

    def compute_advantages(self, samples: Samples) -> list[float]:
        rewards = shaped_rewards(samples, self.config)
        return group_advantages(rewards, samples.group_ids, normalize_std=False, leave_one_out=False)

    def to_batch(self, samples: Samples, advantages: Sequence[float]) -> TokenBatch:
        """The samples as tensors; lengths enter here, so that ``advantages/*`` report plain differences of rewards."""
        limit = self.config.generation.max_new_tokens * self.config.max_turns
        by_length = [
            advantage * sample.response_tokens / limit for advantage, sample in zip(advantages, samples, strict=True)
        ]
        return super().to_batch(samples, by_length)
