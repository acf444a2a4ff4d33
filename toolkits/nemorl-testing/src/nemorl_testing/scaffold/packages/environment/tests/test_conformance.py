"""The contract of environments, and what this one promises besides."""

from __future__ import annotations

import pytest
from nemorl.errors import DataError
from nemorl.types import Prompt, Score
from nemorl_testing import conformance

from nemorl_example.config import ExampleConfig

SUM = {"text": "12+7=", "answer": "19"}

test_conformance = conformance(
    "environments",
    "example",
    examples=[(SUM, "19", 1.0), (SUM, "That makes 19.", 1.0), (SUM, "19 or 20", 0.0), (SUM, "", 0.0)],
)


def test_a_long_response_scores_nothing_and_is_counted() -> None:
    environment = ExampleConfig(max_chars=10).build()
    score = environment.score(Prompt(0, "12+7=", (1,), answer="19"), "It must be 19")  # 13 characters
    assert isinstance(score, Score)
    assert (score.reward, score.metrics["too_long"]) == (0.0, 1.0)


def test_a_row_without_an_answer_is_an_error_and_no_silent_zero() -> None:
    with pytest.raises(DataError, match="has no answer"):
        ExampleConfig().build().score(Prompt(0, "12+7=", (1,)), "19")
