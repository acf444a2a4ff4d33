"""Several rewards at once: returned by one function as a dict or list, or given as several functions."""

from __future__ import annotations

from typing import Any

import pytest
from nemorl.contracts.environment import Environment
from nemorl.errors import UsageError
from nemorl.types import Prompt, Score
from nemorl_rl.environments import EnvironmentPool, RewardFunction
from nemorl_rl.environments.sources import as_environment
from recorded_messages import Raises

PROMPT = Prompt(0, "1+1=", (1, 2), answer="2")


def scores(environment: Environment | None, *responses: str) -> list[Score]:
    assert environment is not None
    pool = EnvironmentPool(environment)
    return [step.score for step in pool.step([pool.start(PROMPT) for _ in responses], list(responses))]


def correct(prompt: str, response: str, answer: str) -> float:
    return float(response.strip() == answer)


def tidy(prompt: str, response: str) -> float:
    return 0.5 * float(response == response.strip())


def both(prompt: str, response: str, answer: str) -> dict[str, float]:
    return {"correct": correct(prompt, response, answer), "format": tidy(prompt, response)}


def test_rewards_under_names_add_up_and_stay_apart() -> None:
    first, second, third = scores(RewardFunction(both), "2", " 2", "3")
    assert (first.reward, first.components, first.correct) == (1.5, {"correct": 1.0, "format": 0.5}, True)
    assert (second.reward, second.components, second.correct) == (1.0, {"correct": 1.0, "format": 0.0}, True)
    # The right form of a wrong answer earns something, and is no right answer.
    assert (third.reward, third.components, third.correct) == (0.5, {"correct": 0.0, "format": 0.5}, False)


def test_a_list_of_rewards_is_numbered_as_in_nemo_rl() -> None:
    # NeMo RL's math_multi_reward has reward1, reward2, … and their sum as the total.
    (score,) = scores(RewardFunction(lambda prompt, response: [1, 0.25, -0.5]), "x")
    assert (score.reward, score.components) == (0.75, {"reward1": 1.0, "reward2": 0.25, "reward3": -0.5})
    assert score.correct is None


def test_a_batched_function_returns_a_list_of_dicts_or_a_dict_of_lists() -> None:
    def columns(prompts: list[str], responses: list[str]) -> dict[str, list[float]]:
        return {"correct": [float(text == "a") for text in responses], "format": [len(text) / 4 for text in responses]}

    def rows(prompts: list[str], responses: list[str]) -> list[dict[str, float]]:
        return [{"correct": float(text == "a"), "format": len(text) / 4} for text in responses]

    for function in (columns, rows):
        first, second = scores(RewardFunction(function), "a", "bb")
        assert (first.reward, first.components) == (1.25, {"correct": 1.0, "format": 0.25})
        assert (second.reward, second.components) == (0.5, {"correct": 0.0, "format": 0.5})


def test_an_async_function_may_return_several_too() -> None:
    async def later(prompt: str, response: str) -> dict[str, float]:
        return {"a": 1.0, "b": 2.0}

    (score,) = scores(RewardFunction(later), "x")
    assert (score.reward, score.components) == (3.0, {"a": 1.0, "b": 2.0})


@pytest.mark.parametrize(
    ("function", "facts"),
    [
        (lambda prompt, response: {"correct": "yes"}, ["'correct'", "'yes'"]),
        (lambda prompt, response: [1.0, None], ["'reward2'", None]),
        (lambda prompt, response: {}, ["{}"]),
        (lambda prompt, response: [], ["[]"]),
        (lambda prompts, responses: {"correct": [1.0]}, [1, "'correct'", 2]),
        (lambda prompts, responses: {"correct": 1.0}, ["dict"]),
    ],
)
def test_a_part_that_is_no_reward_is_named(function: Any, facts: list[object], raises: Raises) -> None:
    with raises(UsageError, *facts):
        scores(RewardFunction(function), "x", "y")


def test_several_functions_are_summed_as_trl_sums_them() -> None:
    # TRL: rewards = (rewards_per_func * reward_weights).sum(); here 1 * 1.0 + 0.5 * 0.2.
    (score,) = scores(as_environment([correct, (tidy, 0.2)]), "2")
    assert score.reward == pytest.approx(1.1)
    assert score.components == {"correct": 1.0, "tidy": 0.5}


def test_several_functions_may_be_named_and_the_correct_one_says_what_is_right() -> None:
    environment = as_environment({"format": (tidy, 0.2), "correct": correct})
    right, wrong = scores(environment, "2", "3")
    assert (right.reward, right.components, right.correct) == (
        pytest.approx(1.1),
        {"format": 0.5, "correct": 1.0},
        True,
    )
    assert (wrong.reward, wrong.correct) == (pytest.approx(0.1), False)


def test_functions_and_installed_environments_mix() -> None:
    environment = as_environment({"correct": "exact_match", "format": tidy})
    (score,) = scores(environment, "2")
    assert (score.reward, score.components, score.correct) == (1.5, {"correct": 1.0, "format": 0.5}, True)


def test_two_rewards_of_one_name_ask_for_names(raises: Raises) -> None:
    with raises(UsageError, "tidy"):
        as_environment([tidy, tidy])


def test_a_mapping_of_options_without_a_name_is_no_list_of_rewards(raises: Raises) -> None:
    with raises(UsageError):
        as_environment({"timeout_s": 3})
