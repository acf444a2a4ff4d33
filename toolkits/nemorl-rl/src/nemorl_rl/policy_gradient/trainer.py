"""PolicyGradientTrainer: one step of every policy-gradient algorithm. Rewards become advantages, these become a loss.

An algorithm defines ``compute_advantages``. What else it may replace: the loss (``build_loss``), which groups are worth
training on (``keep_group``), advantages that need log-probs (``token_credit``), any other change of a batch before its
updates (``build_transforms``).

torch is imported where it is used: an algorithm's file may hold both its config and its trainer, and loading a config
needs no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from nemorl.errors import UsageError
from nemorl.metrics import Metrics
from nemorl.types import Row, Sample, Samples

from nemorl_rl.policy_gradient.advantages import dropped, has_spread, over_valid
from nemorl_rl.policy_gradient.config import PolicyGradientConfig
from nemorl_rl.policy_gradient.metrics import advantage_metrics, group_metrics, kl_metrics
from nemorl_rl.policy_gradient.penalties import PenaliseMessages
from nemorl_rl.policy_gradient.seats import by_seat
from nemorl_rl.policy_gradient.updates import BatchTransform, transformed
from nemorl_rl.rollouts.engine import RolloutPlan, rollout_metrics
from nemorl_rl.rollouts.outcomes import outcome_metrics
from nemorl_rl.trainer import RolloutTrainer

if TYPE_CHECKING:
    from nemorl_tensors import TokenBatch
    from torch import Tensor

    from nemorl_rl.policy_gradient.loss import PolicyGradientLoss
    from nemorl_rl.policy_gradient.token_masks import TokenMask

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
    transforms: Sequence[BatchTransform] = ()
    """Changes to a batch before its updates that the config asks for, in order."""

    def setup(self) -> None:
        self.transforms = self.build_transforms()
        if self.transforms_read("reference_logprobs") and not self.config.needs_reference:
            raise UsageError(
                f"a transform of {type(self).__name__} reads reference_logprobs, and the config needs no reference",
                fix=f"let `needs_reference` of {type(self.config).__name__} return True, also where kl_penalty is 0",
            )
        self.loss = self.build_loss()

    def train_step(self, rows: Sequence[Row]) -> Metrics:
        config = self.config
        # 1. Sample G responses per prompt from the current weights, each scored by the environment.
        episodes = self.collect(rows)

        # 2. Rewards become advantages, one per response, or per seat where the policy plays several: a role is compared
        # with itself. A response without a verdict is in no baseline.
        samples = by_seat(episodes, config.seat_baseline)
        low, high, least = config.advantage_clip_low, config.advantage_clip_high, config.rollouts.min_group
        advantages = over_valid(samples, self.compute_advantages, low, high, least)

        # 3. Freeze the policies the loss compares against, before any update moves the weights.
        batch = self.with_frozen_logprobs(self.to_batch(samples, advantages))

        # 4. Apply the batch transforms: tokens left out, a KL charged to the reward, messages penalised.
        batch, changes = transformed(batch, samples, self.transforms)

        # 5. Update, then publish: the next rollout must come from the new weights.
        first_loss = self.first_loss
        minibatches = self.cut(episodes, batch, config.num_minibatches, first_loss=first_loss)
        epochs = config.num_epochs_per_rollout
        updates = self.update_policy(self.loss, minibatches, epochs=epochs, first_loss=first_loss)
        self.sync_weights()
        return {
            **rollout_metrics(episodes),
            **outcome_metrics(samples, advantages),
            **group_metrics(samples, advantages),
            **advantage_metrics(batch),
            **kl_metrics(batch),
            **changes,
            **updates,
        }

    # What an algorithm defines

    def compute_advantages(self, samples: Samples) -> list[float]:
        """How much better each response is than expected, in sample order; by default what the config says.

        Args:
            samples: The scored responses of a step: ``samples.rewards`` and, beside it, ``samples.group_ids``, the
                index of each one's prompt. Never empty, and without those that nobody could score.
        """
        return self.config.advantages(samples)

    def build_loss(self) -> PolicyGradientLoss:
        return self.config.build_loss(**self.loss_options)

    def keep_group(self, group: Sequence[Sample]) -> bool:
        """Dynamic sampling trains on this group: by default, where its rewards differ (DAPO, arXiv:2503.14476)."""
        return has_spread([sample for sample in group if sample.score.valid])

    def to_batch(self, samples: Samples, advantages: Sequence[float]) -> TokenBatch:
        """The samples as tensors, each token with the advantage of its response."""
        from nemorl_tensors import TokenBatch

        batch = TokenBatch.from_samples(
            samples,
            advantages,
            loss_aggregation=self.averaged_over(self.config.averages_over),
            temperature=self.config.generation.temperature,
            drop=self.dropped(samples),
        )
        if self.config.max_token_staleness is not None:
            batch = batch.with_tokens(staleness=self.staleness(samples))
        return replace(batch, keep=self.config.token_filter)

    def staleness(self, samples: Samples) -> Tensor:
        """[N] float32: updates between the weights that each token was sampled from and those of before this step."""
        import torch

        learning = self.progress.step - 1
        ages = [learning - version for part in samples.sequences for version in part.token_versions]
        return torch.tensor(ages, dtype=torch.float32)

    def build_transforms(self) -> list[BatchTransform]:
        """The batch transforms of the config's knobs: what is left out, token-level credit, then penalties."""
        from nemorl_rl.policy_gradient.disagreement import DropDisagreeing, DropFilteredOut
        from nemorl_rl.policy_gradient.token_masks import MarkHighEntropy

        config = self.config
        limit, penalties = config.max_sequence_error, config.message_penalties
        are_filtered = config.filtered_logprobs and (config.updates_per_step > 1 or limit is not None)
        return [
            *([DropFilteredOut()] if are_filtered else ()),
            *([DropDisagreeing(limit)] if limit is not None else ()),
            *self.token_credit(),
            *([] if config.high_entropy_frac is None else [MarkHighEntropy(config.high_entropy_frac)]),
            *([PenaliseMessages(penalties, self.tokenizer.inner.decode)] if penalties is not None else ()),
        ]

    def token_credit(self) -> list[BatchTransform]:
        """Transforms that make ``advantages`` differ within a response: turns are credited where the config asks for
        it, and with ``kl_in: reward`` a KL is charged."""
        config = self.config
        bounds = config.advantage_clip_low, config.advantage_clip_high
        turns = config.turn_credit(*bounds, config.rollouts.min_group)
        if config.reward_kl_penalty == 0:
            return turns
        from nemorl_rl.policy_gradient.kl_charge import ChargeKL

        return [*turns, ChargeKL(config.reward_kl_penalty, config.kl_term())]

    # What follows from the config

    @property
    def loss_options(self) -> dict[str, Any]:
        """Keywords that every loss of the family takes."""
        from nemorl_rl.policy_gradient.correction import build_correction

        config = self.config
        return {
            # Where one update follows a rollout, the old policy is the one at hand.
            "on_policy": config.updates_per_step == 1 and not self.transforms_read("old_logprobs"),
            "correction": build_correction(config.importance_correction),
            "kl_penalty": config.loss_kl_penalty,
            "kl": config.kl_term(),
            "token_masks": self.token_masks(),
            "entropy_bonus": config.entropy_bonus,
        }

    def token_masks(self) -> tuple[TokenMask, ...]:
        """What leaves tokens out of the surrogate, as the config asks for it."""
        from nemorl_rl.policy_gradient.token_masks import HighEntropyMask, OffPolicyMask, StaleTokenMask

        config = self.config
        return (
            *(() if config.max_token_staleness is None else (StaleTokenMask(config.max_token_staleness),)),
            *(() if config.off_policy_mask is None else (OffPolicyMask(config.off_policy_mask),)),
            *(() if config.high_entropy_frac is None else (HighEntropyMask(),)),
        )

    def transforms_read(self, *fields: str) -> bool:
        return any(not transform.requires.isdisjoint(fields) for transform in self.transforms)

    @property
    def reads_moments(self) -> bool:
        """A transform reads what the old policy's whole distribution was."""
        return self.transforms_read("old_entropies", "old_collisions")

    @property
    def first_loss(self) -> PolicyGradientLoss | None:
        """The loss of a step's first update, which finds the old policy's log-probs in its own forward pass.

        None where it has to be told them as the others are: the first minibatch comes again in another epoch, or a
        transform reads them.
        """
        config = self.config
        one_pass = config.num_minibatches > 1 and config.num_epochs_per_rollout == 1
        if not one_pass or self.reads_moments or self.transforms_read("old_logprobs"):
            return None
        first = replace(self.loss, on_policy=True)
        return None if "old_logprobs" in first.requires else first

    def with_frozen_logprobs(self, batch: TokenBatch) -> TokenBatch:
        """The batch with those ``old_logprobs`` and ``reference_logprobs`` that this step reads."""
        if self.reads_moments:
            batch = self.with_old_moments(batch)
        elif self.first_loss is None and ("old_logprobs" in self.loss.requires or self.transforms_read("old_logprobs")):
            batch = self.with_old_logprobs(batch)
        return self.with_reference_logprobs(batch) if self.config.needs_reference else batch

    @property
    def batch_size(self) -> int:
        return self.config.num_prompts_per_step

    @property
    def planned_updates(self) -> int:
        return self.total_steps * self.config.updates_per_step

    @property
    def rollout_plan(self) -> RolloutPlan:
        config = self.config
        keep = self._keep_episodes if config.dynamic_sampling else None
        sampling = config.sampling(filtered_logprobs=config.filtered_logprobs)
        return RolloutPlan(config.num_generations_per_prompt, sampling, config.max_turns, keep)

    def _keep_episodes(self, group: Sequence[Sample]) -> bool:
        """Whether any of the groups that the episodes of a prompt fall into, one per role, is to be kept."""
        groups: dict[int, list[Sample]] = {}
        for sample in by_seat(Samples(group), self.config.seat_baseline):
            groups.setdefault(sample.prompt.index, []).append(sample)
        return any(self.keep_group(one) for one in groups.values())

    def dropped(self, samples: Samples) -> list[bool]:
        """Of each response, whether it trains nothing."""
        config = self.config
        return dropped(samples, min_group=config.rollouts.min_group, overlong_filtering=config.overlong_filtering)
