"""Reward functions in TRL's convention, as environments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import nemorl
import pytest
from nemorl.contracts.environment import Environment
from nemorl.errors import UsageError
from nemorl.plugins import Index, Registry
from nemorl.types import Prompt, Score
from nemorl_rl.environments import EnvironmentPool, RewardFunction
from nemorl_rl.environments.sources import as_environment
from nemorl_rl.environments.trl_rewards import TRLReward
from nemorl_testing.plugin import use_registry
from recorded_messages import Raises

CHAT = ({"role": "user", "content": "1+1="},)


def prompt(number: int, *, chat: bool = False, **columns: Any) -> Prompt:
    return Prompt(number, "1+1=", (1, 2), CHAT if chat else (), answer="2", row={"prompt": "1+1=", **columns})


def scores(source: Any, prompts: list[Prompt], responses: list[str]) -> list[Score]:
    environment = as_environment(source)
    assert environment is not None
    pool = EnvironmentPool(environment)
    return [step.score for step in pool.step([pool.start(p) for p in prompts], responses)]


def test_a_function_of_completions_gets_lists_and_columns_without_a_decorator() -> None:
    seen: list[Any] = []

    def right(prompts: list[str], completions: list[str], level: list[int], **columns: Any) -> list[float]:
        seen.extend(zip(prompts, completions, level, strict=True))
        assert columns == {"answer": ["2", "2"]}
        return [float(completion == "2") for completion in completions]

    found = scores(right, [prompt(0, level=1), prompt(1, level=3)], ["2", "5"])
    assert [score.reward for score in found] == [1.0, 0.0]
    assert sorted(seen) == [("1+1=", "2", 1), ("1+1=", "5", 3)]


def test_conversations_are_passed_as_messages() -> None:
    seen: list[Any] = []

    @nemorl.trl_reward
    def content_length(prompts: Any, completions: Any) -> list[int]:
        seen.append(prompts[0])
        return [len(completion[0]["content"]) for completion in completions]

    (score,) = scores(content_length, [prompt(0, chat=True)], ["four"])
    assert (score.reward, seen) == (4.0, [[{"role": "user", "content": "1+1="}]])


def test_a_decorated_function_still_works_where_trl_calls_it() -> None:
    @nemorl.trl_reward
    def brevity(completions: list[str], **columns: Any) -> list[float]:
        """Shorter is better."""
        return [-float(len(completion)) for completion in completions]

    assert brevity(prompts=["a"], completions=["four"], trainer_state=None) == [-4.0]
    assert (brevity.name, brevity.__doc__) == ("brevity", "Shorter is better.")


def test_none_leaves_a_response_unscored() -> None:
    def even(completions: list[str], **_: Any) -> list[float | None]:
        return [None if len(completion) % 2 else 1.0 for completion in completions]

    first, second = scores(even, [prompt(0), prompt(1)], ["ab", "abc"])
    assert (first.reward, first.valid) == (1.0, True)
    assert (second.reward, second.valid) == (0.0, False)


def test_in_a_list_only_those_count_that_apply() -> None:
    # As TRL sums: None is left out; a response for which all say None is in no baseline.
    def even(completions: list[str], **_: Any) -> list[float | None]:
        return [None if len(completion) % 2 else 1.0 for completion in completions]

    def short(completions: list[str], **_: Any) -> list[float | None]:
        return [0.5 if len(completion) < 4 else None for completion in completions]

    found = scores([even, (short, 2.0)], [prompt(0), prompt(1), prompt(2)], ["ab", "abc", "abcde"])
    assert [(score.reward, score.valid) for score in found] == [(2.0, True), (1.0, True), (0.0, False)]


def test_async_functions_and_names_with_weights() -> None:
    async def later(completions: list[str], **_: Any) -> list[float]:
        return [1.0 for _ in completions]

    assert [score.reward for score in scores(later, [prompt(0)], ["x"])] == [1.0]
    (score,) = scores({"exact_match": 1.0, "math": 0.25}, [prompt(0)], ["2"])
    assert (score.reward, score.components) == (1.25, {"exact_match": 1.0, "math": 1.0})


def test_a_registered_function_in_trls_convention_is_an_environment() -> None:
    def lengths(completions: list[str], **_: Any) -> list[float]:
        return [float(len(completion)) for completion in completions]

    with use_registry(Registry(Index.installed())):
        nemorl.register_environment("trl_lengths")(lengths)
        (score,) = scores("trl_lengths", [prompt(0)], ["four"])
    assert score.reward == 4.0


def needs_state(completions: Any, trainer_state: Any) -> list[float]:
    return []


def needs_ids(completions: Any, completion_ids: Any) -> list[float]:
    return []


@pytest.mark.parametrize(
    ("function", "fact"),
    [
        (lambda prompt, response: 1.0, "TRL's"),
        (needs_state, "`trainer_state`"),
        (needs_ids, "`completion_ids`"),
    ],
)
def test_what_cannot_be_called_as_trl_does_is_refused(function: Callable[..., Any], fact: str, raises: Raises) -> None:
    with raises(UsageError, fact):
        nemorl.trl_reward(function)


def test_the_wrong_number_of_rewards_is_an_error(raises: Raises) -> None:
    with raises(UsageError, 1, 2):
        TRLReward(lambda completions: [1.0, 2.0]).checked([1.0, 2.0])


def test_lists_given_to_a_function_of_one_response_name_trls_convention() -> None:
    environment: Environment = RewardFunction(lambda prompt, response: 1.0)
    with pytest.raises(UsageError) as found:
        environment.score([prompt(0)], ["2"])  # type: ignore[arg-type]
    assert "@nemorl.trl_reward" in str(found.value)
