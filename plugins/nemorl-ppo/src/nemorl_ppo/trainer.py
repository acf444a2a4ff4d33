"""PPO: collect, ask the critic, pay rewards, estimate advantages, update the critic, update the policy, publish."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from nemorl.errors import BackendError
from nemorl.metrics import Mean, Metric, Metrics
from nemorl.types import Row, Samples
from nemorl_rl.data.tokenizer import Tokenizer
from nemorl_rl.policy_gradient.advantages import dropped
from nemorl_rl.policy_gradient.correction import build_correction
from nemorl_rl.policy_gradient.kl_charge import with_kl
from nemorl_rl.policy_gradient.metrics import advantage_metrics, kl_metrics
from nemorl_rl.policy_gradient.rewards import shaped_rewards
from nemorl_rl.policy_gradient.seats import by_seat
from nemorl_rl.policy_gradient.updates import of_role, run_updates
from nemorl_rl.rollouts.engine import RolloutPlan, accuracy_of, rollout_metrics
from nemorl_rl.rollouts.outcomes import outcome_metrics
from nemorl_rl.trainer import RolloutTrainer
from nemorl_tensors import TokenBatch, masked_max, masked_mean, masked_min, segment_sum, standardized

from nemorl_ppo.config import PPOConfig
from nemorl_ppo.credit import advantages, explained_variance, length_adaptive_lambdas, terminal_rewards, turn_rewards
from nemorl_ppo.loss import PPOLoss
from nemorl_ppo.value_loss import ValueLoss


class PPOTrainer(RolloutTrainer[PPOConfig]):
    """Proximal policy optimisation with a critic (arXiv:1707.06347)."""

    config_class = PPOConfig

    def setup(self) -> None:
        config = self.config
        self.policy_loss = PPOLoss(
            **config.ratio_options,
            correction=build_correction(config.importance_correction),
            kl_penalty=config.loss_kl_penalty,
            kl=config.kl_term(),
            positive_nll_weight=config.positive_nll_weight,
            on_policy=config.updates_per_step == 1,
        )
        self.value_loss = ValueLoss(config.value_clip)
        self.critic = self.run.auxiliary_models["critic"]
        if config.critic.model_name:
            require_same_tokens(self.tokenizer, config.critic.model_name)

    def train_step(self, rows: Sequence[Row]) -> Metrics:
        # 1. Sample responses from the current weights, each scored by the environment.
        episodes = self.collect(rows)
        samples = by_seat(episodes)
        batch = self.to_batch(samples)

        # 2. What the critic expected before each token, and how likely the policies found it: before any update.
        batch = self.with_old_values(batch)
        batch = self.with_logprobs(batch)

        # 3. Pay the environment's reward at the last token of a response, and charge the KL where it arises.
        batch = self.with_rewards(batch)

        # 4. Credit: how much better than expected it went from each token on. And what to expect the next time.
        batch = self.with_advantages(batch)
        first_loss = self.first_loss
        minibatches = self.cut(episodes, batch, self.config.num_minibatches, first_loss=first_loss)
        minibatches = [self.with_positive_weights(part) for part in minibatches]

        # 5. The critic learns, and in the first steps nobody else: advantages against a new head are noise.
        epochs = self.config.num_epochs_per_rollout
        with self.run.timer.phase("critic_training"):
            critic_metrics = run_updates(self.critic, self.value_loss, minibatches, epochs=epochs)
        policy_metrics: Metrics = {}
        if self.is_policy_learning:
            policy_metrics = self.update_policy(self.policy_loss, minibatches, epochs=epochs, first_loss=first_loss)

        # 6. Publish: the next rollout must come from the new weights.
        self.sync_weights()
        of_critic = of_role("critic", critic_metrics)
        return {
            **rollout_metrics(episodes),
            **outcome_metrics(samples),
            **credit_metrics(batch),
            **of_critic,
            **policy_metrics,
        }

    @property
    def batch_size(self) -> int:
        return self.config.num_prompts_per_step

    @property
    def planned_updates(self) -> int:
        """Of the policy; the critic has those of its warm-up beside them."""
        return max(1, self.total_steps - self.config.critic_warmup_steps) * self.config.updates_per_step

    @property
    def rollout_plan(self) -> RolloutPlan:
        config = self.config
        return RolloutPlan(config.num_generations_per_prompt, config.sampling(), config.max_turns)

    @property
    def is_policy_learning(self) -> bool:
        return self.step > self.config.critic_warmup_steps

    @property
    def first_loss(self) -> PPOLoss | None:
        """The loss of the policy's first update in a step, which finds the old policy's log-probs in its own forward
        pass. None where it is told them: the first minibatch comes again, or the KL is charged with them."""
        config = self.config
        one_pass = config.num_minibatches > 1 and config.num_epochs_per_rollout == 1
        if not one_pass or config.charges_kl or not self.is_policy_learning:
            return None
        return replace(self.policy_loss, on_policy=True)

    def to_batch(self, samples: Samples) -> TokenBatch:
        """The samples as tensors, with the reward of each and whether it is right.

        Every token sequence of an agent's episode is paid the reward of the episode.
        """
        config = self.config
        batch = TokenBatch.from_samples(
            samples,
            loss_aggregation=self.averaged_over(config.loss_aggregation),
            temperature=config.generation.temperature,
            drop=dropped(samples, min_group=config.rollouts.min_group, overlong_filtering=config.overlong_filtering),
        )
        by_turn = turn_rewards(samples, batch.mask)
        batch = batch.with_tokens(turn_rewards=by_turn if config.credit == "turn" else torch.zeros_like(by_turn))
        return batch.with_sequences(
            episode_rewards=torch.tensor(shaped_rewards(samples, config), dtype=torch.float32)[batch.episodes],
            is_right=torch.tensor([accuracy_of(sample) > 0 for sample in samples])[batch.episodes],
        )

    def with_old_values(self, batch: TokenBatch) -> TokenBatch:
        """The batch with ``old_values``: what the critic says of the state before each token."""
        with self.run.timer.phase("values"):
            return batch.with_tokens(old_values=self.critic.get_values(batch))

    def with_logprobs(self, batch: TokenBatch) -> TokenBatch:
        """The batch with those ``old_logprobs`` and ``reference_logprobs`` that this step reads."""
        read = set(self.policy_loss.requires) if self.is_policy_learning else set()
        if self.config.charges_kl:
            read |= {"old_logprobs", "reference_logprobs"}
        if "old_logprobs" in read and self.first_loss is None:
            batch = self.with_old_logprobs(batch)
        if "reference_logprobs" in read:
            batch = self.with_reference_logprobs(batch)
        return batch

    def with_rewards(self, batch: TokenBatch) -> TokenBatch:
        """The batch with ``rewards`` per token, and with ``kl`` where the KL is part of them.

        r_t = [t is the last trained token] * reward - kl_penalty * KL_t                          arXiv:2009.01325

        With ``credit: turn``, turns have theirs at their last tokens, and the end has what is left of the reward.
        """
        paid = segment_sum(batch["turn_rewards"], batch.mask, batch.lengths)
        paid_B = torch.zeros(len(batch)).index_add_(0, batch.episodes, paid)[batch.episodes]
        at_the_end = terminal_rewards(batch["episode_rewards"] - paid_B, batch.mask, batch.lengths)
        rewards = batch["turn_rewards"] + at_the_end
        if self.config.charges_kl:
            batch = with_kl(batch, self.config.kl_term())
            rewards = rewards - self.config.kl_penalty * batch["kl"]
        return batch.with_tokens(rewards=rewards)

    def with_advantages(self, batch: TokenBatch) -> TokenBatch:
        """The batch with ``advantages`` for the policy and ``returns`` for the critic.

        ``raw_advantages`` are those before whitening. With one lambda for both, returns are values + raw advantages.
        """
        config, mask, lengths = self.config, batch.mask, batch.lengths

        def estimate(lambdas_B: torch.Tensor) -> torch.Tensor:
            return advantages(
                batch["rewards"], batch["old_values"], mask, lengths, gamma=config.gae_gamma, lambdas_B=lambdas_B
            )

        with self.run.timer.phase("advantage_calculation"):
            raw = estimate(self.policy_lambdas(batch))
            lambda_value = config.gae_lambda if config.gae_lambda_value is None else config.gae_lambda_value
            returns = batch["old_values"] + estimate(torch.full(lengths.shape, lambda_value))
            credit = standardized(raw, mask, unbiased=True) if config.normalize_advantages else raw
        return batch.with_tokens(raw_advantages=raw, advantages=credit, returns=returns)

    def policy_lambdas(self, batch: TokenBatch) -> torch.Tensor:
        """[B] lambda of each response's advantages."""
        config = self.config
        if config.length_adaptive_alpha is not None:
            return length_adaptive_lambdas(batch.mask, batch.lengths, config.length_adaptive_alpha)
        chosen = config.gae_lambda if config.gae_lambda_policy is None else config.gae_lambda_policy
        return torch.full(batch.lengths.shape, chosen)

    def with_positive_weights(self, minibatch: TokenBatch) -> TokenBatch:
        """The minibatch with the ``positive_weights`` that its imitation term reads: of right responses, sum 1."""
        if "positive_weights" not in self.policy_loss.requires:
            return minibatch
        right = minibatch.mask & minibatch["is_right"][minibatch.sequence_ids]
        return minibatch.with_tokens(positive_weights=replace(minibatch, mask=right).with_new_weights().loss_weights)


def credit_metrics(batch: TokenBatch) -> dict[str, Metric]:
    """Metrics of the critic's values, their targets and the advantages between, over the trained tokens."""
    mask = batch.mask
    metrics: dict[str, Metric] = {
        "critic/explained_var": Mean(explained_variance(batch["old_values"], batch["returns"], mask))
    }
    fields = {"advantages/": "raw_advantages", "critic/values_": "old_values", "critic/returns_": "returns"}
    for prefix, name in fields.items():
        for kind, reduce in (("mean", masked_mean), ("max", masked_max), ("min", masked_min)):
            metrics[f"{prefix}{kind}"] = reduce(batch[name], mask)
    return metrics | advantage_metrics(batch) | kl_metrics(batch)


def require_same_tokens(tokenizer: Tokenizer, model_name: str) -> None:
    """The model must give every token of ``tokenizer`` the same number.

    Raises:
        BackendError: it does not, so it would read other words than were written.
    """
    vocabulary = Tokenizer.load(model_name).inner.get_vocab()
    own = tokenizer.inner.get_vocab()
    foreign = sorted(token for token, index in own.items() if vocabulary.get(token) != index)
    if foreign:
        raise BackendError(
            f"critic.model_name {model_name!r} has another tokenizer than the policy: {len(foreign)} of the policy's "
            f"tokens mean something else to it, e.g. {foreign[0]!r}",
            fix="use a reward model of the policy's family, or leave critic.model_name unset",
        )
