"""Several environments as one: sums and chains of sync, async, batched and talking parts."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from nemorl.contracts.environment import Environment
from nemorl.errors import ForeignError, UsageError
from nemorl.types import Prompt, Score, Step
from nemorl_rl.environments import ChainEnvironment, EnvironmentPool, Part, RewardFunction, Stage, WeightedEnvironment
from recorded_messages import Raises

PROMPT = Prompt(0, "1+1=", (1, 2), answer="2")


def step(environment: Environment, responses: list[str]) -> list[Step]:
    pool = EnvironmentPool(environment)
    return pool.step([pool.start(PROMPT) for _ in responses], responses)


def right(prompt: str, response: str, answer: str) -> Score:
    return Score(float(answer in response), metrics={"length": float(len(response))}, correct=answer in response)


def is_short(prompt: str, response: str) -> float:
    return float(len(response) < 4)


async def later(prompt: str, response: str) -> float:
    await asyncio.sleep(0.001)
    return float(len(response))


class Together:
    """A batched function that remembers how often it was called with how much."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def __call__(self, prompts: list[str], responses: list[str]) -> list[float]:
        self.sizes.append(len(prompts))
        return [float(len(response)) for response in responses]


class Countdown(Environment):
    """A conversation of three turns, right when it ends with 'go'."""

    name = "countdown"

    def start(self, prompt: Prompt) -> Any:
        return _Counting()


class _Counting:
    def __init__(self) -> None:
        self.left = 3

    def step(self, response: str) -> Step:
        self.left -= 1
        if self.left == 0:
            return Step(Score(1.0, correct=response == "go"))
        return Step(Score(0.0), f"{self.left} …", done=False)


# Weighted


def test_a_weighted_environment_adds_up_its_parts_and_keeps_each() -> None:
    environment = WeightedEnvironment({"answer": (right, 1.0), "short": Part(is_short, weight=0.5)})
    (good, wordy, wrong) = step(environment, ["2", "it is 2", "3"])
    # 1 * 1 + 0.5 * 1,  1 * 1 + 0.5 * 0,  1 * 0 + 0.5 * 1
    assert [s.score.reward for s in (good, wordy, wrong)] == [1.5, 1.0, 0.5]
    assert wordy.score.components == {"answer": 1.0, "short": 0.0}
    assert wordy.score.metrics == {"answer/length": 7.0}
    assert [s.score.correct for s in (good, wordy, wrong)] == [True, True, False]


def test_the_leading_part_says_what_is_correct() -> None:
    environment = WeightedEnvironment({"short": is_short, "answer": right}, lead="answer")
    assert [s.score.correct for s in step(environment, ["2", "a long 3"])] == [True, False]


def test_a_batched_part_sees_the_whole_turn_beside_blocking_and_async_parts() -> None:
    together = Together()
    parts = {"model": RewardFunction(together, batched=True), "short": is_short, "judge": later}
    steps = step(WeightedEnvironment(parts), ["a", "bb", "ccc"] * 10)
    assert together.sizes == [30]
    assert steps[1].score.components == {"model": 2.0, "short": 1.0, "judge": 2.0}
    assert steps[1].score.reward == 5.0


def test_compositions_nest() -> None:
    inner = WeightedEnvironment({"answer": right, "short": (is_short, 0.1)})
    (only,) = step(WeightedEnvironment({"both": (inner, 2.0), "judge": later}), ["2"])
    assert only.score.reward == pytest.approx(2 * 1.1 + 1)
    assert only.score.metrics == {"both/answer/length": 1.0}


def test_the_leading_part_leads_the_conversation_and_others_score_every_turn() -> None:
    pool = EnvironmentPool(WeightedEnvironment({"game": Countdown(), "short": (is_short, 0.1)}))
    episode = pool.start(PROMPT)
    steps = [pool.step([episode], [response])[0] for response in ("three", "two", "go")]
    assert [s.observation for s in steps] == ["2 …", "1 …", None]
    assert [s.score.reward for s in steps] == pytest.approx([0.0, 0.1, 1.1])
    assert (steps[2].done, steps[2].score.correct) == (True, True)


def test_parts_may_be_named_plugins_or_their_options() -> None:
    environment = WeightedEnvironment({"math": "math", "strict": {"name": "math", "require_marker": True}})
    (only,) = step(environment, ["The sum is 2"])
    environment.close()
    assert only.score.components == {"math": 1.0, "strict": 0.0}


def test_an_error_names_the_part(raises: Raises) -> None:
    def judge(prompt: str, response: str) -> float:
        raise OSError("down")

    with raises(ForeignError, "weighted.judge", "OSError"):
        step(WeightedEnvironment({"answer": right, "judge": judge}), ["x"])


def test_mistakes_in_parts_are_told(raises: Raises) -> None:
    with raises(UsageError):
        WeightedEnvironment({})
    with raises(UsageError, "anser", "'answer'"):
        WeightedEnvironment({"answer": right}, lead="anser")
    with raises(UsageError):
        WeightedEnvironment({"answer": None})
    with raises(UsageError):
        ChainEnvironment({"answer": Part(right)})


def test_closing_closes_every_part() -> None:
    class Closing(Environment):
        closed = 0

        def close(self) -> None:
            self.closed += 1

    parts = {"a": Closing(), "b": Closing()}
    WeightedEnvironment(parts).close()
    assert [part.closed for part in parts.values()] == [1, 1]

    class Broken(Closing):
        def close(self) -> None:
            super().close()
            raise BrokenPipeError("it hangs")

    several = [Broken(), Closing(), Broken()]
    with pytest.raises(BrokenPipeError):
        WeightedEnvironment(dict(zip("abc", several, strict=True))).close()
    assert [part.closed for part in several] == [1, 1, 1]


# Chains


def test_a_chain_stops_at_the_first_part_that_is_not_passed() -> None:
    together = Together()
    environment = ChainEnvironment(
        {"short": Stage(is_short, weight=0.0), "model": Stage(RewardFunction(together, batched=True), weight=2.0)}
    )
    steps = step(environment, ["a", "far too long", "bb"] * 5)
    assert [s.score.reward for s in steps[:3]] == [2.0, 0.0, 4.0]
    assert [dict(s.score.components) for s in steps[:2]] == [{"short": 1.0, "model": 1.0}, {"short": 0.0}]
    assert [s.score.correct for s in steps[:3]] == [None, False, None]
    assert together.sizes == [10]  # the ten that passed the gate, in one call


@pytest.mark.parametrize("kind", [WeightedEnvironment, ChainEnvironment])
def test_a_part_that_could_not_judge_makes_the_whole_no_judgement(kind: Any) -> None:
    def judged(prompt: str, response: str) -> Score:
        return Score(1.0, valid=response != "down")

    steps = step(kind({"up": is_short, "service": judged}), ["2", "down"])
    alone = step(kind({"service": judged, "up": is_short}), ["2", "down"])
    assert [s.score.valid for s in alone] == [True, False]
    # A chain does not ask the service about a response that failed the gate before it.
    assert [s.score.valid for s in steps] == [True, kind is ChainEnvironment]


def test_passing_means_reaching_the_threshold() -> None:
    environment = ChainEnvironment({"judge": Stage(later, threshold=2.0), "answer": right})
    assert [len(s.score.components) for s in step(environment, ["2", "22"])] == [1, 2]


def test_a_chain_goes_on_after_an_async_gate_with_blocking_async_and_batched_parts() -> None:
    together = Together()
    parts = {"judge": later, "answer": right, "again": later, "model": RewardFunction(together, batched=True)}
    first, second = step(ChainEnvironment(parts), ["2", "3"])
    assert dict(first.score.components) == {"judge": 1.0, "answer": 1.0, "again": 1.0, "model": 1.0}
    assert dict(second.score.components) == {"judge": 1.0, "answer": 0.0}


def test_a_gate_ends_a_conversation() -> None:
    pool = EnvironmentPool(ChainEnvironment({"short": is_short, "game": Countdown()}))
    episode = pool.start(PROMPT)
    first, second = (pool.step([episode], [response])[0] for response in ("one", "too long"))
    assert (first.observation, first.done) == ("2 …", False)
    assert (second.observation, second.done, second.score.correct) == (None, True, False)
