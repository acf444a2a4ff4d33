"""PolicyGradientTrainer: one step of every policy-gradient algorithm. Rewards become advantages, these become a loss.

An algorithm defines ``compute_advantages``. What else it may replace: the loss (``build_loss``), which groups are worth
training on (``keep_group``), advantages that need log-probs (``with_token_advantages``).

torch is imported where it is used: an algorithm's file may hold both its config and its trainer, and loading a config
needs no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from nemorl.metrics import Metric, Metrics
from nemorl.types import Row, Sample, Samples

from nemorl_rl.policy_gradient.advantages import has_spread, over_valid
from nemorl_rl.policy_gradient.config import PolicyGradientConfig
from nemorl_rl.policy_gradient.metrics import advantage_metrics, group_metrics, kl_metrics
from nemorl_rl.policy_gradient.penalties import penalised
from nemorl_rl.policy_gradient.updates import run_updates
from nemorl_rl.rollouts.engine import RolloutPlan, rollout_metrics
from nemorl_rl.trainer import RolloutTrainer

if TYPE_CHECKING:
    from nemorl_tensors import TokenBatch

    from nemorl_rl.policy_gradient.loss import PolicyGradientLoss

P = TypeVar("P", bound=PolicyGradientConfig)


class PolicyGradientTrainer(RolloutTrainer[P]):
    """Samples, turns rewards into advantages, updates, publishes. Subclasses define ``compute_advantages``.

    Example:
        >>> from nemorl_rl.policy_gradient.advantages import group_advantages
        >>> from nemorl_rl.policy_gradient.config import ClippedConfig
        >>> class MeanBaselineTrainer(PolicyGradientTrainer[ClippedConfig]):
        ...     config_class = ClippedConfig
        ...
        ...     def compute_advantages(self, samples: Samples) -> list[float]:
        ...         return group_advantages(samples.rewards, samples.group_ids, normalize_std=False)
    """

    loss: PolicyGradientLoss

    def setup(self) -> None:
        self.loss = self.build_loss()

    def train_step(self, rows: Sequence[Row]) -> Metrics:
        config = self.config
        # 1. Sample G responses per prompt from the current weights, each scored by the environment.
        samples = self.collect(rows)

        # 2. Rewards become advantages, one per response. A response that nobody could score is in no baseline.
        advantages = over_valid(samples, self.compute_advantages, *config.advantage_bounds)

        # 3. Freeze the policies the loss compares against, before any update moves the weights.
        batch = self.to_batch(samples, advantages)
        first_loss = self.first_loss
        if "old_logprobs" in self.loss.requires and first_loss is None:
            batch = self.with_old_logprobs(batch)
        batch, disagreement = self.without_disagreement(batch)
        if config.needs_reference:
            batch = self.with_reference_logprobs(batch)
        batch = self.with_token_advantages(batch, samples)
        batch, penalties = self.with_message_penalties(batch, samples)
        minibatches = batch.minibatches(config.num_minibatches)
        if first_loss is not None:
            minibatches = self.later_with_old_logprobs(batch, minibatches)
        self.recorder.batch(samples, minibatches)

        # 4. Update, then publish: the next rollout must come from the new weights.
        with self.run.timer.phase("policy_training"):
            epochs = config.num_epochs_per_rollout
            updates = run_updates(self.run.policy, self.loss, minibatches, epochs=epochs, first_loss=first_loss)
        self.sync_weights()
        return {
            **rollout_metrics(samples),
            **group_metrics(samples, advantages),
            **advantage_metrics(batch),
            **kl_metrics(batch),
            **disagreement,
            **penalties,
            **updates,
        }

    # What an algorithm defines

    def compute_advantages(self, samples: Samples) -> list[float]:
        """How much better each response is than expected, in sample order.

        Args:
            samples: The scored responses of a step: ``samples.rewards`` and, beside it, ``samples.group_ids``, the
                index of each one's prompt. Never empty, and without those that nobody could score.
        """
        raise NotImplementedError(f"{type(self).__name__} must define compute_advantages()")

    def build_loss(self) -> PolicyGradientLoss:
        """GRPO's clipped loss, with the bounds of ``ClippedRatio``."""
        from nemorl_rl.policy_gradient.loss import ClippedPolicyGradientLoss

        return ClippedPolicyGradientLoss(**self.config.ratio_options, **self.loss_options)

    def keep_group(self, group: Sequence[Sample]) -> bool:
        """Dynamic sampling trains on this group: by default, where its rewards differ (DAPO, arXiv:2503.14476)."""
        return has_spread([sample for sample in group if sample.score.valid])

    def to_batch(self, samples: Samples, advantages: Sequence[float]) -> TokenBatch:
        """The samples as tensors, each token with the advantage of its response."""
        from nemorl_tensors import TokenBatch

        batch = TokenBatch.from_samples(
            samples,
            advantages,
            loss_aggregation=self.config.averages_over,
            temperature=self.config.generation.temperature,
            drop=[self.is_dropped(sample) for sample in samples],
        )
        return replace(batch, keep=self.config.token_filter)

    def with_token_advantages(self, batch: TokenBatch, samples: Samples) -> TokenBatch:
        """The batch with ``advantages`` that depend on log-probs: less the KL of a response, against its group.

        Unchanged unless the config charges the KL to the reward (``kl_in: reward``).
        """
        config = self.config
        if config.reward_kl_penalty == 0:
            return batch
        from nemorl_rl.policy_gradient.kl_charge import group_kl, with_kl

        batch = with_kl(batch, config.kl_term())
        charge = config.reward_kl_penalty * group_kl(batch["kl"], batch, samples.group_ids)
        return batch.with_tokens(advantages=batch["advantages"] - charge)

    def with_message_penalties(self, batch: TokenBatch, samples: Samples) -> tuple[TokenBatch, dict[str, Metric]]:
        """The batch with other advantages on faulty messages, where ``message_penalties`` asks for them."""
        penalties = self.config.message_penalties
        if penalties is None:
            return batch, {}
        return penalised(batch, samples.sequences, penalties, self.tokenizer.inner.decode)

    # What follows from the config

    @property
    def loss_options(self) -> dict[str, Any]:
        """Keywords that every loss of the family takes."""
        from nemorl_rl.policy_gradient.correction import build_correction

        config = self.config
        return {
            "on_policy": not self.needs_old_logprobs,
            "correction": build_correction(config.importance_correction),
            "kl_penalty": config.loss_kl_penalty,
            "kl": config.kl_term(),
        }

    @property
    def needs_old_logprobs(self) -> bool:
        """The old policy is not simply the one at hand, or something is computed from its log-probs before the update.

        It is the one at hand where one update follows a rollout.
        """
        return self.config.updates_per_step > 1 or self.reads_old_logprobs

    @property
    def reads_old_logprobs(self) -> bool:
        """Something but the loss is computed from the old policy's log-probs: which tokens or responses are left out,
        or the KL that a reward is charged with."""
        config = self.config
        filters = config.updates_per_step > 1 and config.token_filter is not None
        return filters or config.max_sequence_error is not None or config.reward_kl_penalty > 0

    @property
    def first_loss(self) -> PolicyGradientLoss | None:
        """The loss of a step's first update, which finds the old policy's log-probs in its own forward pass.

        None where it has to be told them as the others are: the first minibatch comes again in another epoch, or
        something else is computed from them.
        """
        config = self.config
        if config.num_minibatches == 1 or config.num_epochs_per_rollout > 1 or self.reads_old_logprobs:
            return None
        first = replace(self.loss, on_policy=True)
        return None if "old_logprobs" in first.requires else first

    @property
    def batch_size(self) -> int:
        return self.config.num_prompts_per_step

    @property
    def planned_updates(self) -> int:
        return self.total_steps * self.config.updates_per_step

    @property
    def rollout_plan(self) -> RolloutPlan:
        config = self.config
        keep = self.keep_group if config.replaces_equal_groups else None
        sampling = config.generation.sampling(filtered_logprobs=config.filtered_logprobs)
        return RolloutPlan(config.num_generations_per_prompt, sampling, config.max_turns, keep)

    def is_dropped(self, sample: Sample) -> bool:
        """Truncated responses with overlong filtering, and those that nobody could score, train nothing."""
        return not sample.score.valid or (self.config.overlong_filtering and sample.truncated)

    def without_disagreement(self, batch: TokenBatch) -> tuple[TokenBatch, dict[str, Metric]]:
        """The batch without what trainer and sampler disagree on too much (``max_sequence_error``), and without tokens
        that the trainer's filter leaves out (``filtered_logprobs``)."""
        from nemorl_rl.policy_gradient.disagreement import drop_disagreeing, drop_filtered_out

        if batch.keep is not None and "old_logprobs" in batch:
            batch = drop_filtered_out(batch)
        limit = self.config.max_sequence_error
        return (batch, {}) if limit is None else drop_disagreeing(batch, limit)
