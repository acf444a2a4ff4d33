"""Reward sources of users, turned into environments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nemorl.config.component import Component
from nemorl.contracts.environment import Environment
from nemorl.errors import UsageError, boundary
from nemorl.plugins.kinds import EnvironmentConfig
from nemorl.types import Prompt, Score
from pydantic_core import PydanticCustomError

from nemorl_rl.environments.composition import Part, WeightedEnvironment, named_parts
from nemorl_rl.environments.functions import RewardFunction
from nemorl_rl.environments.trl_rewards import TRLReward, is_trl_reward

RewardSource = Callable[..., Any] | Environment | EnvironmentConfig | str | Mapping[str, Any] | Sequence[Any]
"""``f(prompt, response)`` or ``f(prompts, responses)``, a function in TRL's convention (``f(completions, **columns)``),
an environment, its config, or its name; or several of these, whose rewards add up: ``[f, "math", (g, 0.1)]``, by name
``{"correct": "math", "format": (f, 0.1)}``, or as names with weights ``{"math": 1.0, "exact_match": 0.1}``."""


def as_environment(source: Any) -> Environment | None:
    """An environment, its config, name or mapping with a name, a function, several of these, or nothing."""
    if source is None or isinstance(source, Environment):
        return source
    if isinstance(source, list | tuple) and source:
        source = named_parts(source)
    if isinstance(source, Mapping) and source and all(_is_weight(part) for part in source.values()):
        source = {name: (name, weight) for name, weight in source.items()}
    if isinstance(source, Mapping) and any(_is_part(part) for part in source.values()):
        return WeightedEnvironment(source, lead="correct" if "correct" in source else None)
    if isinstance(source, str | Mapping):
        try:
            source = Component("environments").resolve(source)
        except PydanticCustomError as error:
            found = error.context or {}
            raise UsageError(found["message"], fix=found["fix"]) from error
    if isinstance(source, EnvironmentConfig):
        with boundary(f"environment {type(source).__name__}"):
            return source.build()  # type: ignore[return-value]
    if callable(source):
        return TRLReward(source) if is_trl_reward(source) else RewardFunction(source)
    raise UsageError(f"{source!r} cannot score responses", fix="pass f(prompt, response), an Environment or its name")


def _is_part(value: Any) -> bool:
    """It scores responses, so the mapping that holds it names several rewards and is no plugin's options."""
    return callable(value) or isinstance(value, Environment | EnvironmentConfig | Part | tuple)


def _is_weight(value: Any) -> bool:
    """A number, so that the mapping that holds it has names of environments with their weights."""
    return isinstance(value, int | float) and not isinstance(value, bool)


class Unscored(Environment):
    """For algorithms that learn without rewards: no response is judged, and a conversation has one turn."""

    name = "unscored"

    def score(self, prompt: Prompt, response: str) -> Score:
        return Score(0.0, valid=False)
