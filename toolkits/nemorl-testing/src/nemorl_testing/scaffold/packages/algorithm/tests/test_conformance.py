"""The contract of algorithms, and what this one promises besides."""

from __future__ import annotations

import pytest
import torch
from nemorl.types import Prompt, Sample, Samples, Score
from nemorl_tensors import TokenBatch
from nemorl_testing import conformance

from nemorl_example.config import ExampleConfig
from nemorl_example.loss import ExampleLoss
from nemorl_example.trainer import ExampleTrainer

SMALL = {"num_prompts_per_step": 4, "num_generations_per_prompt": 4}

test_conformance = conformance("algorithms", {"name": "example", **SMALL})


def sample(prompt: int, reward: float) -> Sample:
    return Sample(Prompt(prompt, "1+1=", (5,)), (5, 6), (False, True), (0.0, -1.0), Score(reward), "2", "stop")


def test_an_advantage_is_the_reward_minus_the_mean_of_its_prompt() -> None:
    samples = Samples([sample(0, 1), sample(1, 3), sample(0, 0), sample(1, 1), sample(1, 2)])
    # means: (1 + 0) / 2 = 0.5 and (3 + 1 + 2) / 3 = 2
    trainer = ExampleTrainer(ExampleConfig(model="some/model"))
    assert trainer.compute_advantages(samples) == [0.5, 1, -0.5, -1, 0]


def test_the_loss_weighs_log_probs_by_advantages_and_skips_what_is_masked() -> None:
    batch = TokenBatch.from_sequences([[5, 6, 7], [5, 8]], [[False, True, True], [False, False]])
    sampled = torch.tensor([torch.nan, -0.5, -0.25, torch.nan, torch.nan])
    advantages = torch.tensor([torch.nan, 2.0, -1.0, torch.nan, torch.nan])
    batch = batch.with_tokens(advantages=advantages, generation_logprobs=sampled)
    loss, _ = ExampleLoss(on_policy=True)(sampled, batch)
    # -(2 * -0.5 + -1 * -0.25) / 2 trained tokens = 0.375
    assert float(loss) == pytest.approx(0.375)
