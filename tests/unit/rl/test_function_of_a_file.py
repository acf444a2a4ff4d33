"""A function of a file is an environment wherever a config names one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from nemorl.config.load import load_config
from nemorl.contracts.environment import Environment
from nemorl.errors import ConfigError
from nemorl.types import Prompt
from recorded_messages import Raises

REWARDS = """
from nemorl import Environment

def score(prompt, response, answer):
    return float(answer in response)

def trl(completions, answer, **columns):
    return [float(one == right) for one, right in zip(completions, answer)]

class Shouting(Environment):
    def score(self, prompt, response):
        return float(response.isupper())
"""


@pytest.fixture
def rewards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "reward.py").write_text(REWARDS)
    (tmp_path / "math").mkdir()
    (tmp_path / "math.py").write_text(REWARDS)
    monkeypatch.chdir(tmp_path)
    return "reward.py"


def config(**changes: Any) -> dict[str, Any]:
    return {"algorithm": "grpo", "model": "org/model", "data": "arithmetic", **changes}


def environment(**changes: Any) -> Environment:
    built: Environment = load_config(config(**changes)).environment.build()  # type: ignore[attr-defined]
    return built


@pytest.mark.parametrize(
    ("changes", "response", "reward"),
    [
        ({"environment": "reward.py:score"}, "it is 4", 1.0),
        ({"environment": "./reward.py:score"}, "it is 5", 0.0),
        ({"reward_fn": "reward.py:score"}, "it is 4", 1.0),
        ({"environment": {"name": "reward.py:score"}}, "it is 4", 1.0),
        ({"environment": {"function": "reward.py:score"}}, "it is 4", 1.0),
        ({"environment": "math.py:score"}, "4", 1.0),
        ({"environment": "reward.py:Shouting"}, "FOUR", 1.0),
        ({"environment": {"name": "function", "function": "reward.py:Shouting"}}, "four", 0.0),
    ],
    ids=str,
)
def test_a_function_or_class_of_a_file_scores(
    rewards: str, changes: dict[str, Any], response: str, reward: float
) -> None:
    prompt = Prompt(0, "2+2", (), row={"answer": "4"})
    assert environment(**changes).score(prompt, response) == reward


def test_a_function_in_the_convention_of_trl_is_one(rewards: str) -> None:
    assert type(environment(reward_fn="reward.py:trl")).__name__ == "TRLReward"


def test_a_resolved_config_says_the_same(rewards: str) -> None:
    first = load_config(config(reward_fn="reward.py:score"))
    assert load_config(first.model_dump(mode="json")) == first


def test_it_stands_inside_other_environments(rewards: str) -> None:
    parts = {"right": {"environment": "reward.py:score", "weight": 2.0}}
    assert load_config(config(environment={"name": "weighted", "parts": parts}))
    assert load_config(config(environment={"name": "agent", "reward": "reward.py:score"}))


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({"environment": "reward.py:scor"}, "environment"),
        ({"environment": "rewards.py:score"}, "environment"),
        ({"environment": "reward.py"}, "environment"),
        ({"environment": {"name": "function", "function": "score"}}, "environment"),
        ({"reward_fn": "score"}, "reward_fn"),
        ({"reward_fn": "reward.py:score", "environment": "math"}, "reward_fn"),
        ({"environment": {"name": "reward.py:score", "weight": 2}}, "environment.weight"),
    ],
    ids=str,
)
def test_what_is_wrong_with_it_is_said_as_the_config_loads(
    rewards: str, raises: Raises, changes: dict[str, Any], path: str
) -> None:
    with raises(ConfigError, path=path):
        load_config(config(**changes))
