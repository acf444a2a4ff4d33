"""The contract of datasets, and what this one promises besides."""

from __future__ import annotations

import pytest
from nemorl_testing import conformance
from pydantic import ValidationError

from nemorl_example.config import ExampleConfig

test_conformance = conformance("datasets", "example")


def test_no_product_is_both_trained_on_and_held_out() -> None:
    config = ExampleConfig(largest=5, num_validation=10)
    train, held_out = config.build("train"), config.build("validation")
    assert train is not None
    assert held_out is not None
    prompts = [row["prompt"] for row in [*train, *held_out]]
    assert len(prompts) == len(set(prompts)) == 25  # 5 * 5
    assert len(held_out) == 10


def test_holding_everything_out_is_refused() -> None:
    with pytest.raises(ValidationError, match="none to train on"):
        ExampleConfig(largest=3, num_validation=9)
