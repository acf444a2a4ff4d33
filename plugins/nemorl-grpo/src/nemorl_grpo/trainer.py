"""The step of the policy-gradient family: sample, credit each response, update, publish. GRPO is its plainest member.

``PolicyGradientTrainer`` is the step, ``GroupTrainer`` adds what comparing within groups takes, ``PenalizedTrainer``
the KL from the initial policy, ``ClippedTrainer`` GRPO's loss. A variant (``variants/``) overrides the credit of a
response, the loss, or what a token owes beyond it.

torch is imported where it is used: a variant's file holds config and trainer, and loading a config needs no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from nemorl.metrics import Max, Mean, Metric, Metrics, Min, average
from nemorl.types import Row, Sample, Samples
from nemorl_rl.rollouts import RolloutPlan, rollout_metrics
from nemorl_rl.trainer import RolloutTrainer

from nemorl_grpo.advantages import EPSILON, clip_advantages, differ, group_advantages
from nemorl_grpo.config import (
    ClippedConfig,
    GroupConfig,
    GroupCredit,
    GRPOConfig,
    PenalizedConfig,
    PolicyGradientConfig,
)
from nemorl_grpo.rewards import shaped_rewards

if TYPE_CHECKING:
    from nemorl_tensors import LossAggregation, TokenBatch

    from nemorl_grpo.loss_base import PolicyGradientLoss

P = TypeVar("P", bound=PolicyGradientConfig)
G = TypeVar("G", bound=GroupConfig)
L = TypeVar("L", bound=PenalizedConfig)
K = TypeVar("K", bound=ClippedConfig)


class PolicyGradientTrainer(RolloutTrainer[P]):
    """What the family shares. A variant sets ``loss`` in ``setup`` and defines ``advantages``."""

    loss: PolicyGradientLoss

    def train_step(self, rows: Sequence[Row]) -> Metrics:
        # 1. Sample G responses per prompt from the current weights, each scored by the environment.
        samples = self.collect(rows)

        # 2. Credit: each reward against the other responses to the same prompt.
        advantages = over_valid(samples, self.advantages)

        # 3. Freeze the policies the loss compares against, before any update moves the weights.
        batch = self.to_batch(samples, advantages)
        if "old_logprobs" in self.loss.requires:
            batch = self.with_old_logprobs(batch)
        batch, disagreement = self.without_disagreement(batch)
        if self.config.needs_reference:
            batch = self.with_reference_logprobs(batch)
        batch = self.credit_tokens(batch, samples)

        # 4. Update, then publish: the next rollout must come from the new weights.
        with self.run.timer.phase("policy_training"):
            updates = [
                self.run.policy.train_step(minibatch, self.loss)
                for _ in range(self.config.num_epochs_per_rollout)
                for minibatch in batch.minibatches(self.config.num_minibatches)
            ]
        self.sync_weights()
        return {
            **rollout_metrics(samples),
            **group_metrics(samples, advantages),
            **kl_metrics(batch),
            **disagreement,
            **average(updates),
        }

    # What a variant defines

    def advantages(self, samples: Samples) -> list[float]:
        """The credit of each response, in sample order."""
        raise NotImplementedError(f"{type(self).__name__} must define advantages()")

    @property
    def loss_aggregation(self) -> LossAggregation:
        """What the loss averages over."""
        return "token"

    def credit_tokens(self, batch: TokenBatch, samples: Samples) -> TokenBatch:
        """The batch with ``advantages`` that depend on log-probs, now that these are known, and perhaps with ``kl``."""
        return batch

    # What follows from the config

    @property
    def needs_old_logprobs(self) -> bool:
        """Whether the old policy is not simply the one at hand, as it is where one update follows a rollout."""
        return self.config.updates_per_step > 1 or self.config.max_sequence_error is not None

    @property
    def loss_settings(self) -> dict[str, Any]:
        """What every loss of the family is told alike."""
        from nemorl_grpo.correction import build_correction

        correction = build_correction(self.config.importance_correction)
        return {"on_policy": not self.needs_old_logprobs, "correction": correction}

    @property
    def batch_size(self) -> int:
        return self.config.num_prompts_per_step

    @property
    def planned_updates(self) -> int:
        return self.total_steps * self.config.updates_per_step

    @property
    def rollout_plan(self) -> RolloutPlan:
        config = self.config
        return RolloutPlan(config.num_generations_per_prompt, config.generation.sampling(), config.max_turns)

    def is_dropped(self, sample: Sample) -> bool:
        """Truncated responses with overlong filtering, and those that nobody could score, train nothing."""
        return not sample.score.valid or (self.config.overlong_filtering and sample.truncated)

    def without_disagreement(self, batch: TokenBatch) -> tuple[TokenBatch, dict[str, Metric]]:
        """The batch without what trainer and sampler disagree on too much, where ``max_sequence_error`` asks for it."""
        limit = self.config.max_sequence_error
        if limit is None:
            return batch, {}
        from nemorl_grpo.disagreement import drop_disagreeing

        return drop_disagreeing(batch, limit)

    def to_batch(self, samples: Samples, advantages: Sequence[float]) -> TokenBatch:
        """The samples as tensors, each token with the advantage of its response."""
        from nemorl_tensors import TokenBatch

        return TokenBatch.from_samples(
            samples,
            advantages,
            loss_aggregation=self.loss_aggregation,
            temperature=self.config.generation.temperature,
            drop=[self.is_dropped(sample) for sample in samples],
        )


class GroupTrainer(PolicyGradientTrainer[G]):
    """A variant that compares responses within their group. It defines ``setup`` and ``credit``."""

    def credit(self, samples: Samples) -> list[float]:
        """The credit of each response against its group, in sample order."""
        raise NotImplementedError(f"{type(self).__name__} must define credit()")

    def advantages(self, samples: Samples) -> list[float]:
        config = self.config
        return clip_advantages(self.credit(samples), config.advantage_clip_low, config.advantage_clip_high)

    def keep_group(self, group: Sequence[Sample]) -> bool:
        """Whether dynamic sampling keeps a group."""
        return has_spread([sample for sample in group if sample.score.valid])

    @property
    def rollout_plan(self) -> RolloutPlan:
        return replace(super().rollout_plan, keep=self.keep_group if self.config.dynamic_sampling else None)


class PenalizedTrainer(GroupTrainer[L]):
    """A variant that charges the KL from the initial policy, in the loss or in the reward."""

    @property
    def loss_settings(self) -> dict[str, Any]:
        return {**super().loss_settings, "kl_penalty": self.config.loss_kl_penalty, "kl": self.config.kl_term()}

    @property
    def needs_old_logprobs(self) -> bool:
        """The KL that is charged to the reward is theirs."""
        return super().needs_old_logprobs or self.config.charges_kl

    def credit_tokens(self, batch: TokenBatch, samples: Samples) -> TokenBatch:
        from nemorl_grpo.token_credit import group_kl

        config = self.config
        if not config.charges_kl:
            return batch
        kl = config.kl_term().estimate(batch["old_logprobs"], batch["reference_logprobs"], batch.mask)
        charge = config.kl_penalty * group_kl(kl, batch, samples.group_ids)
        return batch.with_tokens(kl=kl, advantages=batch["advantages"] - charge)


class ClippedTrainer(PenalizedTrainer[K]):
    """A variant with GRPO's loss. It defines ``credit``."""

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
    def loss_aggregation(self) -> LossAggregation:
        return self.config.loss_aggregation


class GRPOTrainer(ClippedTrainer[GRPOConfig]):
    """Group relative policy optimisation (arXiv:2402.03300)."""

    config_class = GRPOConfig

    def credit(self, samples: Samples) -> list[float]:
        return group_credit(samples, self.config)


def group_credit(samples: Samples, config: GroupCredit) -> list[float]:
    """GRPO's credit of each response: shaped rewards against mean and spread of their group."""
    return group_advantages(
        shaped_rewards(samples, config),
        samples.group_ids,
        normalize_std=config.normalize_std,
        leave_one_out=config.leave_one_out,
    )


def over_valid(samples: Samples, credit: Callable[[Samples], list[float]]) -> list[float]:
    """The credit of the responses that could be scored, among themselves; 0 for the others.

    An environment that cannot judge a response says so with ``Score.valid``: its reward is in no baseline.
    """
    if all(sample.score.valid for sample in samples):
        return credit(samples)
    valid = Samples([sample for sample in samples if sample.score.valid])
    found = iter(credit(valid) if valid else ())
    return [next(found) if sample.score.valid else 0.0 for sample in samples]


def has_spread(group: Sequence[Sample]) -> bool:
    """Whether a group teaches anything: rewards that are all equal give advantage 0 (DAPO, arXiv:2503.14476)."""
    return differ([sample.reward for sample in group])


def kl_metrics(batch: TokenBatch) -> dict[str, Metric]:
    """The KL that rewards were charged, where they were."""
    from nemorl_tensors import masked_mean

    return {"kl_penalty": masked_mean(batch["kl"], batch.mask)} if "kl" in batch else {}


def group_metrics(samples: Samples, advantages: Sequence[float]) -> dict[str, Metric]:
    """Spread of advantages, and how many groups teach nothing because all their rewards are equal."""
    groups: dict[int, list[float]] = {}
    for sample in samples:
        groups.setdefault(sample.prompt.index, []).append(sample.reward)
    means = [sum(rewards) / len(rewards) for rewards in groups.values()]
    mixed = [differ(rewards) for rewards in groups.values()]
    return {
        "advantages/mean": Mean.of(advantages),
        "advantages/max": Max.of(advantages),
        "advantages/min": Min.of(advantages),
        "baseline_reward/pct_0": Mean.of(float(abs(mean) <= EPSILON) for mean in means),
        "baseline_reward/pct_1": Mean.of(float(abs(mean - 1.0) <= EPSILON) for mean in means),
        "baseline_reward/pct_mixed": Mean.of(map(float, mixed)),
    }
