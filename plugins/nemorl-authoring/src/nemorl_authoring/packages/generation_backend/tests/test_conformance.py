"""The contract of generation backends, and what this one promises besides."""

from __future__ import annotations

import pytest
import torch
from nemorl.testing import conformance
from nemorl.types import SamplingParams

from nemorl_example.sampling import truncated

test_conformance = conformance("generation_backends", "example")


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        (SamplingParams(), [0.1, 0.5, 0.15, 0.25]),
        (SamplingParams(top_k=2), [0.0, 0.5, 0.0, 0.25]),
        (SamplingParams(top_p=0.6), [0.0, 0.5, 0.0, 0.25]),  # 0.5 is not enough, 0.5 + 0.25 is
        (SamplingParams(top_k=2, top_p=0.6), [0.0, 0.5, 0.0, 0.0]),  # 0.5 of the 0.75 that top_k leaves is
        (SamplingParams(min_p=0.4), [0.0, 0.5, 0.0, 0.25]),  # 0.4 * 0.5 = 0.2
    ],
)
def test_truncation_keeps_the_likeliest(params: SamplingParams, kept: list[float]) -> None:
    assert truncated(torch.tensor([[0.1, 0.5, 0.15, 0.25]]), params)[0].tolist() == pytest.approx(kept)
