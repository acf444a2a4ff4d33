"""The contract of algorithms, and what RAFT promises besides."""

from __future__ import annotations

import pytest
import torch
from nemorl.types import Prompt, Sample, Samples, Score
from nemorl_tensors import TokenBatch
from nemorl_testing import conformance

from nemorl_raft.trainer import ImitationLoss, best_of_each

SMALL = {"num_prompts_per_step": 4, "num_generations_per_prompt": 4}

test_conformance = conformance("algorithms", {"name": "raft", **SMALL})
test_conformance_with_a_threshold = conformance(
    "algorithms", {"name": "raft", **SMALL, "min_reward": 0.5}, only=["small_run_finishes"]
)


def sample(index: int, reward: float, response: str) -> Sample:
    return Sample(Prompt(index, "1+1=", (5,)), (5, 6), (False, True), (0.0, -1.0), Score(reward), response, "stop")


def test_the_first_of_the_best_responses_to_each_prompt_is_kept() -> None:
    rewards = [(0, 0.0, "a"), (0, 1.0, "b"), (0, 1.0, "c"), (3, -1.0, "d"), (3, -2.0, "e")]
    best = best_of_each(Samples([sample(*given) for given in rewards]))
    assert [kept.response for kept in best] == ["b", "d"]


def test_the_loss_is_the_mean_negative_log_likelihood_of_trained_tokens() -> None:
    batch = TokenBatch.from_sequences([[5, 6, 7]], [[False, True, True]])
    loss, _ = ImitationLoss()(torch.tensor([torch.nan, -0.5, -1.5]), batch)
    assert float(loss) == pytest.approx(1.0)  # (0.5 + 1.5) / 2
