"""The contract of algorithms, and what this one promises besides."""

from __future__ import annotations

import pytest
import torch
from nemorl_tensors import TokenBatch
from nemorl_testing import conformance

from nemorl_example.loss import ExampleLoss
from nemorl_example.trainer import centred

SMALL = {"num_prompts_per_step": 4, "num_generations_per_prompt": 4}

test_conformance = conformance("algorithms", {"name": "example", **SMALL})


def test_credit_is_the_reward_minus_the_mean_of_its_prompt() -> None:
    # means: (1 + 0) / 2 = 0.5 and (3 + 1 + 2) / 3 = 2
    assert centred([1, 3, 0, 1, 2], [0, 1, 0, 1, 1]) == [0.5, 1, -0.5, -1, 0]


def test_the_loss_weighs_log_probs_by_credit_and_skips_what_is_masked() -> None:
    batch = TokenBatch.from_sequences([[5, 6, 7], [5, 8]], [[False, True, True], [False, False]])
    batch = batch.with_tokens(advantages=torch.tensor([torch.nan, 2.0, -1.0, torch.nan, torch.nan]))
    logprobs = torch.tensor([torch.nan, -0.5, -0.25, torch.nan, torch.nan])
    loss, _ = ExampleLoss()(logprobs, batch)
    # -(2 * -0.5 + -1 * -0.25) / 2 trained tokens = 0.375
    assert float(loss) == pytest.approx(0.375)
