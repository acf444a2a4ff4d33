"""The contract of hooks, and what this one promises besides."""

from __future__ import annotations

from typing import Any

import pytest
from nemorl.types import Prompt, Sample, Samples, Score
from nemorl_testing import conformance

from nemorl_example.config import ExampleConfig
from nemorl_example.hook import teaches

test_conformance = conformance("hooks", "example")


def samples(*groups: tuple[float, ...]) -> Samples:
    """Responses with these rewards, a group for each prompt."""
    return Samples(
        [
            Sample(Prompt(index, "1+1=", (5,)), (5, 6), (False, True), (0.0, -1.0), Score(reward), "2", "stop")
            for index, group in enumerate(groups)
            for reward in group
        ]
    )


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([(0.0, 1.0), (0.0, 0.0)], True),
        ([(0.0, 0.0), (1.0, 1.0)], False),  # prompts differ, responses to each do not
        ([], False),
    ],
)
def test_a_step_teaches_when_responses_to_one_prompt_differ(rewards: list[tuple[float, ...]], expected: bool) -> None:
    assert teaches(samples(*rewards)) is expected


def test_the_run_is_stopped_when_patience_is_at_its_end() -> None:
    class Trainer:
        def __init__(self) -> None:
            self.reasons: list[str] = []

        def stop(self, reason: str) -> None:
            self.reasons.append(reason)

    trainer: Any = Trainer()
    hook: Any = ExampleConfig(patience_steps=2).build()
    for rewards in [(0.0, 0.0), (0.0, 1.0), (1.0, 1.0)]:  # the second teaches, so the count begins anew
        hook.on_rollout_end(trainer, samples(rewards))
    assert trainer.reasons == []
    hook.on_rollout_end(trainer, samples((1.0, 1.0)))
    assert trainer.reasons == ["2 steps in a row without a difference in rewards"]
