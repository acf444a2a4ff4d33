"""The contract of hooks, and what this one promises besides."""

from __future__ import annotations

import pytest
from nemorl.types import Prompt, Sample, Samples, Score
from nemorl_testing import conformance

from nemorl_example.hook import teaches

test_conformance = conformance("hooks", "example")


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([(0.0, 1.0), (0.0, 0.0)], True),
        ([(0.0, 0.0), (1.0, 1.0)], False),  # prompts differ, responses to each do not
        ([], False),
    ],
)
def test_a_step_teaches_when_responses_to_one_prompt_differ(rewards: list[tuple[float, ...]], expected: bool) -> None:
    samples = [
        Sample(Prompt(index, "1+1=", (5,)), (5, 6), (False, True), (0.0, -1.0), Score(reward), "2", "stop")
        for index, group in enumerate(rewards)
        for reward in group
    ]
    assert teaches(Samples(samples)) is expected
