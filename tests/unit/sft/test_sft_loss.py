"""Negative log-likelihood by hand."""

from __future__ import annotations

import pytest
import torch
from nemorl_sft.loss import NLLLoss
from nemorl_tensors import TokenBatch

NAN = float("nan")
LOGPROBS = [NAN, -0.1, -0.2, -0.6, NAN, -2.1]
"""Answers of 3 and 1 tokens after one prompt token each."""


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        ("token", 0.75),  # (0.1 + 0.2 + 0.6 + 2.1) / 4
        ("sequence", 1.2),  # ((0.1 + 0.2 + 0.6) / 3 + 2.1) / 2
    ],
)
def test_the_loss_is_the_mean_negative_log_likelihood(level: str, expected: float) -> None:
    batch = TokenBatch.from_sequences(
        [[1] * 4, [1] * 2], [[False, True, True, True], [False, True]], loss_aggregation=level
    )  # type: ignore[arg-type]
    logprobs = torch.tensor(LOGPROBS, requires_grad=True)
    value, metrics = NLLLoss()(logprobs, batch)
    value.backward()
    assert float(value.detach()) == pytest.approx(expected)
    assert logprobs.grad is not None
    assert torch.equal(logprobs.grad, -batch.loss_weights)
    assert metrics == {}
    assert NLLLoss.requires == frozenset()
