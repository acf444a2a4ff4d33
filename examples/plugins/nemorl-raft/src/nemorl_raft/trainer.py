"""RAFT's step: sample, keep the best, imitate it, publish."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from nemorl.metrics import Mean, Metrics
from nemorl.types import Row, Sample, Samples
from nemorl_rl.policy_gradient.updates import run_updates
from nemorl_rl.rollouts.engine import RolloutPlan, rollout_metrics
from nemorl_rl.trainer import RolloutTrainer
from nemorl_tensors import TokenBatch
from torch import Tensor

from nemorl_raft.config import RaftConfig


@dataclass(frozen=True)
class ImitationLoss:
    """loss = -sum(loss_weights * policy_logprobs): the mean negative log-likelihood of what is imitated, in nats."""

    requires: ClassVar[frozenset[str]] = frozenset()

    def __call__(self, policy_logprobs: Tensor, batch: TokenBatch) -> tuple[Tensor, Metrics]:
        kept_N = torch.where(batch.mask, policy_logprobs, 0.0)
        return -(kept_N * batch.loss_weights).sum(), {}


class RaftTrainer(RolloutTrainer[RaftConfig]):
    """Differs from the paper: one optimizer step per round of sampling, so samples come from the current weights."""

    config_class = RaftConfig
    loss = ImitationLoss()

    @property
    def batch_size(self) -> int:
        return self.config.num_prompts_per_step

    @property
    def rollout_plan(self) -> RolloutPlan:
        return RolloutPlan(self.config.num_generations_per_prompt, self.config.generation.sampling())

    def train_step(self, rows: Sequence[Row]) -> Metrics:
        # 1. Sample from the current weights; the environment scores.
        samples = self.collect(rows)

        # 2. The best response to each prompt is trained on. One that is not good enough keeps its place in the batch.
        best, floor, temperature = best_of_each(samples), self.config.min_reward, self.config.generation.temperature
        rejected = [floor is not None and reward < floor for reward in best.rewards]
        batch = TokenBatch.from_samples(best, best.rewards, temperature=temperature, drop=rejected)

        # 3. Update, then publish: the next rollout must come from the new weights.
        with self.run.timer.phase("policy_training"):
            updates = run_updates(self.run.policy, self.loss, [batch])
        self.sync_weights()
        chosen = {"best_reward": Mean.of(best.rewards), "imitated_frac": Mean.of(float(not no) for no in rejected)}
        return {**rollout_metrics(samples), **chosen, **updates}


def best_of_each(samples: Samples) -> Samples:
    """The response of the highest reward to each prompt, the first of equals, in prompt order."""
    best: dict[int, Sample] = {}
    for sample in samples:
        known = best.setdefault(sample.prompt.index, sample)
        if sample.reward > known.reward:
            best[sample.prompt.index] = sample
    return Samples(list(best.values()))
