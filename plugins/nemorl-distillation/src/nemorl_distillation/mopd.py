"""MOPD: GRPO with teachers, each an expert of its domain, who judge every token beside the reward.

A_t = teacher_logprob_t - old_logprob_t + outcome_weight * A_outcome                    arXiv:2601.02780

A_outcome is GRPO's: the reward against mean and spread of its group. A response that nobody could score trains nothing.
Differs from the paper: the loss is PPO's clipped surrogate; its weight against the sampler, which drops tokens out of
bounds, is ``importance_correction: icepop``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from nemorl.metrics import Metric, MetricInfo
from nemorl.types import Samples
from nemorl_rl.policy_gradient.advantages import group_advantages
from nemorl_rl.policy_gradient.config import ClippedConfig, RewardShaping
from nemorl_rl.policy_gradient.rewards import shaped_rewards
from nemorl_rl.policy_gradient.trainer import PolicyGradientTrainer
from nemorl_rl.policy_gradient.updates import BatchTransform
from pydantic import Field

from nemorl_distillation.config import TeacherModels
from nemorl_distillation.declared_metrics import MOPD_METRICS

if TYPE_CHECKING:
    from nemorl.resources.policies import TrainingPolicy
    from nemorl_tensors import TokenBatch

    from nemorl_distillation.teachers import Turn


class MOPDConfig(TeacherModels, RewardShaping, ClippedConfig):
    """Multi-teacher on-policy distillation within GRPO (arXiv:2601.02780)."""

    summary: ClassVar[str] = "GRPO with teachers of several domains, whose word on each token is added to the reward's"
    trainer: ClassVar[str] = "nemorl_distillation.mopd:MOPDTrainer"
    metrics: ClassVar[Mapping[str, MetricInfo]] = {**ClippedConfig.metrics, **MOPD_METRICS}

    algorithm: Literal["mopd"] = "mopd"
    """Name of the algorithm."""
    outcome_weight: float = Field(1.0, ge=0)
    """Weight of what a response earned, which is of size 1, beside the nats between teacher and policy at each token. 0
    is ``opd``."""
    leave_one_out: bool = True
    """Baseline and spread of a response come from the *other* responses of its group, which keeps them unbiased."""
    normalize_std: bool = True
    """Divide by the group's standard deviation. False: hard and easy prompts keep their natural weight."""
    kl_penalty: float = Field(0.0, ge=0)
    """Weight of KL(policy || initial policy). 0 needs no reference model."""

    def advantages(self, samples: Samples) -> list[float]:
        """Of the outcomes alone: weighted, in sample order."""
        rewards = shaped_rewards(samples, self)
        options = {"normalize_std": self.normalize_std, "leave_one_out": self.leave_one_out}
        return [self.outcome_weight * value for value in group_advantages(rewards, samples.group_ids, **options)]


class MOPDTrainer(PolicyGradientTrainer[MOPDConfig]):
    """Multi-teacher on-policy distillation within GRPO (arXiv:2601.02780)."""

    config_class = MOPDConfig

    def setup(self) -> None:
        from nemorl_distillation.trainer import roster

        self.teachers = roster(self.config)
        super().setup()

    def token_credit(self) -> list[BatchTransform]:
        return [AddTeachers(self.turns), *super().token_credit()]

    def turns(self, samples: Samples, batch: TokenBatch) -> Iterator[tuple[Turn, TrainingPolicy]]:
        """The part of a batch that each teacher reads, and its model."""
        from nemorl_distillation.teachers import turns

        for turn in turns(self.teachers, samples.sequences, batch, self.config.teacher_column):
            yield turn, self.run.auxiliary_models[turn.teacher.role]


@dataclass(frozen=True)
class AddTeachers:
    """``advantages`` and, at every token, by how much its teachers find it likelier than the policy before the update.

    A_t <- A_t + sum over its teachers of weight * (max(teacher_logprob_t, -100) - old_logprob_t)
    """

    requires: ClassVar[frozenset[str]] = frozenset({"advantages", "old_logprobs"})

    turns: Callable[[Samples, TokenBatch], Iterable[tuple[Turn, TrainingPolicy]]]
    """What each teacher reads of a batch, and its model"""

    def __call__(self, batch: TokenBatch, samples: Samples) -> tuple[TokenBatch, dict[str, Metric]]:
        import torch
        from nemorl_tensors import masked_mean

        from nemorl_distillation.teachers import sampled_logprobs

        logprobs, weights = sampled_logprobs(self.turns(samples, batch), batch.num_tokens)
        gaps = torch.where(batch.mask, logprobs - batch["old_logprobs"], 0.0)
        added = torch.where(batch.mask, weights * gaps, 0.0)
        metrics: dict[str, Metric] = {
            "teacher_reverse_kl": masked_mean(-gaps, batch.mask),
            "teacher_advantage_size": masked_mean(added.abs(), batch.mask),
            "outcome_advantage_size": masked_mean(batch["advantages"].abs(), batch.mask),
        }
        return batch.with_tokens(advantages=batch["advantages"] + added), metrics
