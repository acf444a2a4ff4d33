"""Reward functions as TRL's trainers call them: lists of completions and of columns in, a list of rewards out."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from nemorl.errors import UsageError
from nemorl.types import Prompt, Score

from nemorl_rl.environments.functions import RewardFunction

COMPLETIONS = "completions"
"""The parameter by which such a function is known."""
ABSENT = {
    "completion_ids": "rewards here see text: tokenize it, or drop the parameter",
    "environments": "write a nemorl.Environment for a conversation",
    "log_extra": "responses and rewards are in the run's records/: drop the parameter",
    "log_metric": "return a nemorl.Score(reward, metrics={…}) per completion, and drop the parameter",
    "trainer_state": "there is no such object here: use a nemorl.Callback for what depends on the step",
}
"""Parameters that TRL passes as well and nemorl does not have; a function may name one only with a default."""
NOT_COLUMNS = frozenset({"prompts", "prompt", COMPLETIONS, "completion", *ABSENT})
"""Names that TRL fills with no column."""


def is_trl_reward(function: Callable[..., Any]) -> bool:
    """True for a function with a parameter ``completions``, which no other convention has."""
    try:
        return COMPLETIONS in inspect.signature(function).parameters
    except (TypeError, ValueError):  # a callable without a signature
        return False


class TRLReward(RewardFunction):
    """A reward function in TRL's convention as an environment; ``nemorl.trl_reward`` makes one.

    The function is called by keyword with ``completions``, ``prompts`` and the dataset's columns, lists of a whole
    turn, as far as its signature asks for them. Where prompts are conversations, a completion is ``[{"role":
    "assistant", "content": …}]``, else text. It returns one number per completion, or None where it does not apply.
    Called itself, it is still that function.

    Example:
        >>> @trl_reward
        ... def brevity(completions, **columns):
        ...     return [-len(completion) / 1000 for completion in completions]
        >>> brevity.name, brevity(completions=["four"])
        ('brevity', [-0.004])
    """

    may_abstain = True

    def __init__(self, function: Callable[..., Any]) -> None:
        parameters = inspect.signature(function).parameters
        name = str(getattr(function, "__name__", type(function).__name__))
        if COMPLETIONS not in parameters:
            raise UsageError(
                f"reward function {name!r} has no parameter `completions`, so it is not in TRL's convention",
                fix="write it as f(prompts, completions, **columns), or as nemorl's f(prompt, response) undecorated",
            )
        for absent, fix in ABSENT.items():
            if absent in parameters and parameters[absent].default is inspect.Parameter.empty:
                raise UsageError(f"reward function {name!r} asks for TRL's `{absent}`", fix=fix)
        functools.update_wrapper(self, function)
        self.name, self.batched = name, True
        self._named = frozenset(parameters)
        self._bind(function, [p for p in parameters.values() if p.name not in NOT_COLUMNS], NOT_COLUMNS)

    def __call__(self, *values: Any, **named: Any) -> Any:
        return self.function(*values, **named)

    def _call_batch(self, asks: list[tuple[Prompt, str]]) -> Any:
        given = {
            "prompts": [[dict(turn) for turn in prompt.messages] or prompt.text for prompt, _ in asks],
            COMPLETIONS: [_as_completion(prompt, response) for prompt, response in asks],
        }
        passed = {name: value for name, value in given.items() if name in self._named or self._takes_all}
        return self.function(**passed, **self._column_lists(asks))

    def _scores(self, results: Any, count: int) -> Sequence[Score]:
        if not isinstance(results, list | tuple):
            return super()._scores(results, count)
        scores = super()._scores([0.0 if result is None else result for result in results], count)
        return [
            Score(0.0, valid=False) if result is None else score for result, score in zip(results, scores, strict=True)
        ]


def trl_reward(function: Callable[..., Any]) -> TRLReward:
    """Marks a reward function as one in TRL's convention: ``f(prompts, completions, **columns) -> list[float]``.

    A function with a parameter ``completions`` is recognised without it.

    Args:
        function: Called with lists, by keyword; may be async.

    Raises:
        UsageError: it has no parameter ``completions``, or needs what only TRL has.

    Example:
        >>> @trl_reward
        ... def right(completions, answer, **columns):
        ...     return [float(a in c) for c, a in zip(completions, answer)]
        >>> right.batched
        True
    """
    return TRLReward(function)


def _as_completion(prompt: Prompt, response: str) -> Any:
    return [{"role": "assistant", "content": response}] if prompt.messages else response
