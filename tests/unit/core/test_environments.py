"""Reward functions, environments and the pool that steps them at once."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest
from nemorl.environments import Environment, EnvironmentPool, RewardFunction
from nemorl.errors import DataError, ForeignError, UsageError
from nemorl.sources import as_environment
from nemorl.types import Prompt, Score, Step

PROMPT = Prompt(0, "1+1=", (1, 2), answer="2", row={"prompt": "1+1=", "level": 3})


def step(environment: Environment, responses: list[str], **options: Any) -> list[Step]:
    pool = EnvironmentPool(environment, **options)
    return pool.step([pool.start(PROMPT) for _ in responses], responses)


def rewards(steps: list[Step]) -> list[float]:
    return [step.score.reward for step in steps]


# Reward functions


def test_a_function_gets_texts_and_the_columns_it_names() -> None:
    def grade(prompt: str, response: str, answer: str, level: int) -> float:
        assert prompt == "1+1="
        return level * float(response == answer)

    assert rewards(step(RewardFunction(grade), ["2", "3"])) == [3.0, 0.0]


def test_a_function_may_name_its_arguments_as_it_likes_and_have_defaults() -> None:
    assert rewards(step(RewardFunction(lambda p, r, colour="red": len(p) + len(r) + len(colour)), ["2"])) == [8.0]


def test_an_object_that_can_be_called_is_a_reward_function() -> None:
    class Length:
        def __call__(self, prompt: str, response: str) -> int:
            return len(response)

    environment = RewardFunction(Length())
    assert environment.name == "Length"
    assert rewards(step(environment, ["abc"])) == [3.0]


@pytest.mark.parametrize("result", [True, 1, 1.0, Score(1.0)], ids=repr)
def test_a_reward_is_a_number_or_a_score(result: Any) -> None:
    (only,) = step(RewardFunction(lambda prompt, response: result), ["x"])
    assert only.score.reward == 1.0
    assert isinstance(only.score.reward, float)
    assert only.done


def test_a_score_keeps_its_parts() -> None:
    score = Score(0.5, {"format": 1.0}, {"parsed": 1.0}, correct=True)
    assert step(RewardFunction(lambda prompt, response: score), ["x"])[0].score is score


@pytest.mark.parametrize(
    "function", [lambda response: 1.0, lambda: 1.0, lambda *texts: 1.0], ids=["one", "none", "star"]
)
def test_a_function_of_fewer_arguments_is_refused(function: Any) -> None:
    with pytest.raises(UsageError, match=r"takes [01] argument\(s\)") as caught:
        RewardFunction(function)
    assert "f(prompt, response)" in str(caught.value.fix)


def test_a_column_that_the_row_lacks_is_told_as_python_tells_it() -> None:
    def grade(prompt: str, response: str, solution: str) -> float:
        return 0.0

    with pytest.raises(ForeignError, match=r"environment 'grade' raised TypeError: .*missing.*'solution'"):
        step(RewardFunction(grade), ["x"])


@pytest.mark.parametrize(("result", "words"), [(None, "NoneType"), ("good", "could not convert"), ([1.0], "list")])
def test_a_reward_that_is_no_number_names_its_function(result: Any, words: str) -> None:
    def grade(prompt: str, response: str) -> Any:
        return result

    with pytest.raises(ForeignError, match=f"environment 'grade' raised .*{words}"):
        step(RewardFunction(grade), ["x"])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_reward_that_is_not_finite_is_refused(value: float) -> None:
    # One NaN would turn its whole group's advantages, and with them the update, into NaN.
    with pytest.raises(ForeignError, match=r"the reward of 'x' is .*, not a finite number"):
        step(RewardFunction(lambda prompt, response: value), ["x"])


def test_async_functions_run_at_the_same_time() -> None:
    arrived = []
    everyone = threading.Event()

    async def grade(prompt: str, response: str) -> float:
        arrived.append(response)
        if len(arrived) == 3:
            everyone.set()
        while not everyone.is_set():  # one after another would never get past this
            await asyncio.sleep(0.001)
        return float(response)

    assert rewards(step(RewardFunction(grade), ["1", "2", "3"], timeout_s=20)) == [1.0, 2.0, 3.0]


def test_an_async_function_that_raises_is_named() -> None:
    async def grade(prompt: str, response: str) -> float:
        raise OSError("judge is down")

    with pytest.raises(ForeignError, match="environment 'grade' raised OSError: judge is down") as caught:
        step(RewardFunction(grade), ["x"])
    assert isinstance(caught.value.__cause__, OSError)


@pytest.mark.parametrize(
    ("source", "kind"), [(lambda p, r: 0, RewardFunction), (Environment(), Environment), (None, type(None))]
)
def test_whatever_scores_is_accepted(source: Any, kind: type) -> None:
    assert type(as_environment(source)) is kind


def test_what_cannot_score_is_refused() -> None:
    with pytest.raises(UsageError, match="3 cannot score responses"):
        as_environment(3)


# The pool


class ByName(Environment):
    """Does what the response says."""

    name = "by-name"

    def __init__(self) -> None:
        self.closed = 0
        self.release = threading.Event()
        self.running = self.most = 0
        self.lock = threading.Lock()

    def score(self, prompt: Prompt, response: str) -> float:
        with self.lock:
            self.running += 1
            self.most = max(self.most, self.running)
        try:
            if response == "stuck":
                self.release.wait(30)
            if response == "raise":
                raise ZeroDivisionError("no")
            if response == "ours":
                raise DataError("row 3 is odd", fix="mend it")
            time.sleep(0.02)
            return float(len(response))
        finally:
            with self.lock:
                self.running -= 1

    def close(self) -> None:
        self.closed += 1


def test_results_come_in_the_order_of_the_responses() -> None:
    assert rewards(step(ByName(), ["a" * size for size in range(20, 0, -1)])) == [float(n) for n in range(20, 0, -1)]


def test_no_more_than_the_allowed_number_run_at_once() -> None:
    environment = ByName()
    step(environment, ["a"] * 9, concurrency=3)
    assert environment.most == 3


def test_a_stuck_step_scores_zero_is_counted_and_holds_up_nobody() -> None:
    environment = ByName()
    steps = step(environment, ["aa", "stuck", "aaa"], timeout_s=0.3)
    environment.release.set()
    assert rewards(steps) == [2.0, 0.0, 3.0]
    assert [s.score.metrics.get("environment_timeout") for s in steps] == [None, 1.0, None]
    assert steps[1].done


def test_a_pool_goes_on_after_a_timeout() -> None:
    environment = ByName()
    pool = EnvironmentPool(environment, timeout_s=0.2, concurrency=1)
    assert rewards(pool.step([pool.start(PROMPT)], ["stuck"])) == [0.0]
    assert rewards(pool.step([pool.start(PROMPT)], ["aa"])) == [2.0]
    environment.release.set()


def test_many_slow_steps_are_not_mistaken_for_a_stuck_one() -> None:
    # 30 steps of 0.02 s on one thread take 0.6 s, each far less than the limit of 0.3 s.
    assert rewards(step(ByName(), ["aa"] * 30, timeout_s=0.3, concurrency=1)) == [2.0] * 30


def test_a_step_that_raises_ends_the_run_and_names_the_environment() -> None:
    with pytest.raises(ForeignError, match="environment 'by-name' raised ZeroDivisionError: no"):
        step(ByName(), ["a", "raise", "a"])


def test_an_error_of_nemorls_own_passes_unchanged() -> None:
    with pytest.raises(DataError, match="row 3 is odd"):
        step(ByName(), ["ours"])


def test_an_environment_that_cannot_start_is_named() -> None:
    class Sleepy(Environment):
        name = "sleepy"

        def start(self, prompt: Prompt) -> Any:
            raise RuntimeError("not now")

    with pytest.raises(ForeignError, match="environment 'sleepy' raised RuntimeError: not now"):
        EnvironmentPool(Sleepy()).start(PROMPT)


def test_an_environment_without_score_says_what_to_define() -> None:
    with pytest.raises(ForeignError, match=r"Environment must define score\(\) or start\(\)"):
        step(Environment(), ["x"])


def test_an_episode_that_returns_a_bare_number_names_its_environment() -> None:
    class Bare(Environment):
        name = "bare"

        def start(self, prompt: Prompt) -> Any:
            return self

        def step(self, response: str) -> float:
            return 1.0

    with pytest.raises(ForeignError, match="environment 'bare' raised"):
        step(Bare(), ["x"])


def test_no_episodes_take_no_time() -> None:
    assert EnvironmentPool(ByName()).step([], []) == []


def test_closing_the_pool_closes_the_environment() -> None:
    environment = ByName()
    EnvironmentPool(environment).close()
    assert environment.closed == 1
