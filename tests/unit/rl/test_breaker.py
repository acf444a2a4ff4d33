"""Steps that teach nothing, one after the other: a dead environment ends the run, equal rewards are warned of."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import nemorl
from nemorl.base.files.jsonl import read_jsonl
from nemorl.errors import BackendError, DeadlineError
from nemorl.types import Outcome, Prompt, Sample, Score
from nemorl_cli.console import Console
from recorded_messages import Raises
from watched_run import WatchedRun

LATE: Outcome = "environment_timeout"


class Told:
    """A run with these settings of ``rollouts.breaker``."""

    def __init__(self, *, is_scored: bool = True, **settings: Any) -> None:
        self._is_scored, self._step = is_scored, 0
        self._run = WatchedRun.of(rollouts={"breaker": settings})

    @property
    def warnings(self) -> list[str]:
        return self._run.told

    @property
    def alerts(self) -> list[tuple[str, int]]:
        return [(event["rule"], event["step"]) for event in self._run.events if event["event"] == "alert"]

    def step(self, *groups: Sequence[float], ends: Sequence[Outcome] = (), **metrics: float) -> None:
        """A rollout of these rewards; ``ends`` are those of the first samples, ``metrics`` the last one's."""
        self._step += 1
        rewards = [(index, reward) for index, group in enumerate(groups) for reward in group]
        outcomes: list[Outcome] = [*ends, *["scored"] * len(rewards)]  # type: ignore[list-item]
        known = [*[{}] * (len(rewards) - 1), metrics]
        samples = [
            Sample(
                Prompt(index, "1+1=", ()),
                (),
                (),
                (),
                Score(reward, metrics=known[n], valid=self._is_scored, outcome=outcomes[n], cause="node3"),
                "2",
                "stop",
            )
            for n, (index, reward) in enumerate(rewards)
        ]
        self._run.rollout(self._step, samples)


def test_three_steps_of_nothing_but_time_outs_end_the_run(raises: Raises) -> None:
    told = Told()
    for _ in range(2):
        told.step([0, 0], [0, 0], ends=[LATE] * 4)
    told.step([0, 0], [0, 1], ends=[LATE])  # three of four answered: the count begins anew
    for _ in range(2):
        told.step([0, 0], [0, 0], ends=[LATE] * 4)
    with raises(DeadlineError, "75%", 6, 3, "node3"):
        told.step([0, 0], [0, 1], ends=["infrastructure", *[LATE] * 2])
    assert told.alerts == [("some_episodes_failed", 1), ("failed_episodes", 6)]


def test_a_few_failures_are_told_once_with_where() -> None:
    told = Told()
    for _ in range(3):
        told.step([0, 1] * 4, ends=["infrastructure"])
    (warning,) = told.warnings
    assert "12% of the episodes of step 1 failed without the policy's doing: infrastructure 1 (node3)" in warning


def test_what_the_policy_did_is_no_failure() -> None:
    told = Told(failed_steps=1)
    told.step([0, 1], [0, 1], ends=["policy_timeout", "truncated", "refused"])
    assert told.alerts == []


def test_the_share_of_failed_episodes_and_the_number_of_steps_can_be_set(raises: Raises) -> None:
    told = Told(failed_frac=0.75, failed_steps=1)
    told.step([0, 1], [0, 1], ends=[LATE, LATE])  # 2 of 4
    with raises(DeadlineError, "75%", 2):
        told.step([0, 1], [0, 1], ends=[LATE, LATE], environment_error=1.0)
    never = Told(failed_steps=0)
    for _ in range(20):
        never.step([0, 0], ends=[LATE, LATE])
    assert never.alerts == [("some_episodes_failed", 1)]


def test_ten_steps_of_equal_rewards_are_warned_of_once_and_again_after_they_recovered() -> None:
    told = Told()
    for _ in range(15):
        told.step([1, 1], [0, 0])  # groups differ from each other, not within
    (warning,) = told.warnings
    assert "in 100% of the groups of step 10, and as many of 10 steps in a row" in warning
    assert "from 0 to 1" in warning
    for _ in range(10):
        told.step([1, 0], [0, 0])
    for _ in range(10):
        told.step([0.1 + 0.2, 0.3], [0, 0])  # equal but for rounding
    assert told.alerts == [("few_mixed_groups", 10), ("few_mixed_groups", 35)]


def test_equal_rewards_may_end_the_run(raises: Raises) -> None:
    told = Told(equal_frac=0.5, equal_steps=2, on_equal="stop")
    told.step([1, 1], [0, 1])
    with raises(BackendError, "50%", 2):
        told.step([1, 1], [0, 1])


def test_groups_of_one_and_unscored_responses_are_not_compared() -> None:
    for told, groups in ((Told(equal_steps=1), [[0], [0]]), (Told(equal_steps=1, is_scored=False), [[0, 0]])):
        told.step(*groups)
        assert told.alerts == []


def test_a_run_with_a_dead_environment_ends_with_an_error_and_an_event(
    tiny_model: Path, tmp_path: Path, raises: Raises
) -> None:
    def sleeps(prompt: str, response: str) -> float:
        time.sleep(1.5)  # 30 times the limit; whoever closes the environment waits for it
        return 1.0

    config = nemorl.load_config(
        {
            "algorithm": "grpo",
            "model": str(tiny_model),
            "run_dir": str(tmp_path / "run"),
            "max_steps": 9,
            "num_prompts_per_step": 1,
            "num_generations_per_prompt": 2,
            "policy": {"init": "random", "max_sequence_tokens": 16},
            "generation": {"max_new_tokens": 2},
            "rollouts": {"environment_timeout_s": 0.05, "breaker": {"failed_steps": 2}},
        }
    )
    with raises(DeadlineError, 2):
        config.build().fit([{"prompt": "1+1="}], sleeps, console=Console(quiet=True))
    names = [event["event"] for event in read_jsonl(tmp_path / "run" / "events.jsonl")]
    assert names == ["started", "weight_receipt", "alert", "alert", "failed"]
