"""The step: sample, credit, update, publish. The rest comes from ``RolloutTrainer``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean

from nemorl.metrics import Metrics
from nemorl.types import Row
from nemorl_rl.rollouts import RolloutPlan, rollout_metrics
from nemorl_rl.trainer import RolloutTrainer
from nemorl_tensors import TokenBatch

from nemorl_example.config import ExampleConfig
from nemorl_example.loss import ExampleLoss


class ExampleTrainer(RolloutTrainer[ExampleConfig]):
    """REINFORCE against the mean reward of the responses to the same prompt."""

    config_class = ExampleConfig
    loss = ExampleLoss()

    @property
    def batch_size(self) -> int:
        return self.config.num_prompts_per_step

    @property
    def rollout_plan(self) -> RolloutPlan:
        return RolloutPlan(self.config.num_generations_per_prompt, self.config.generation.sampling())

    def train_step(self, rows: Sequence[Row]) -> Metrics:
        # 1. Sample from the current weights; the environment scores.
        samples = self.collect(rows)

        # 2. Credit: what a response earned beyond the others to its prompt.
        advantages = centred(samples.rewards, samples.group_ids)
        batch = TokenBatch.from_samples(samples, advantages, temperature=self.config.generation.temperature)

        # 3. Update, then publish: the next rollout must come from the new weights.
        with self.run.timer.phase("policy_training"):
            update = self.run.policy.train_step(batch, self.loss)
        self.sync_weights()
        return {**rollout_metrics(samples), **update}


def centred(rewards: Sequence[float], group_ids: Sequence[int]) -> list[float]:
    """Each reward minus the mean of its group, in input order."""
    groups: dict[int, list[float]] = defaultdict(list)
    for reward, group in zip(rewards, group_ids, strict=True):
        groups[group].append(reward)
    return [reward - fmean(groups[group]) for reward, group in zip(rewards, group_ids, strict=True)]
