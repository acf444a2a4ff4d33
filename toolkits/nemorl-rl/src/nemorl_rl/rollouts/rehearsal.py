"""Before anything loads: does the reward work on the first row of the data?"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

from nemorl.base.packages.distributions import place_of
from nemorl.base.text.reading import shown
from nemorl.base.text.suggest import did_you_mean
from nemorl.contracts.environment import Environment, as_score
from nemorl.errors import ConfigIssue, NemorlError, boundary
from nemorl.media import Media
from nemorl.plugins.slots import foreign_words
from nemorl.types import Prompt, Row

from nemorl_rl.data.tokenizer import Tokenizer
from nemorl_rl.environments import RewardFunction
from nemorl_rl.rollouts.prompts import to_prompt

REHEARSAL_TIMEOUT_S = 10.0
"""A reward that takes longer is left to the run, which has its own limit."""
TRIAL_RESPONSE = "a response"
"""Where the row has no answer to try."""
SURE_MISTAKES = (TypeError, NameError, AttributeError, KeyError, ImportError)
"""Errors that the text of the response rarely causes. Others may be its fault, and become a warning."""


def reward_problems(environment: Environment, row: Row | None) -> Iterator[ConfigIssue]:
    """Problems of a row that lacks what the rewards of an environment ask of it."""
    if row is None:
        return
    yield from _need_problems(environment, row)
    for part in environment.rehearsals():
        yield from _column_problems(part, row)


def rehearse(environment: Environment, row: Row | None, warn: Callable[[str], None]) -> None:
    """Call each reward once, as the run will, on a row.

    Raises:
        ForeignError: it made a mistake that is not the response's.
        UsageError: it returned no number.
    """
    if row is not None:
        for part in environment.rehearsals():
            _rehearse(part, row, warn)


class _AnyFamily:
    """Stands in for that of the model: whether it sees or hears is asked once its tokenizer is loaded."""

    def named(self, media: Media) -> Media:
        return media


class _NoTokens(Tokenizer):
    """Stands in before the model's tokenizer is loaded: a reward function sees text, and the row's images."""

    def __init__(self) -> None:
        super().__init__(None)

    @cached_property
    def family(self) -> Any:
        return _AnyFamily()

    def encode(self, text: str) -> list[int]:
        return []

    def encode_prompt(self, messages: Any, tools: Any = ()) -> list[int]:
        return []


def _need_problems(environment: Environment, row: Row) -> Iterator[ConfigIssue]:
    columns = [str(name) for name in row]
    for name in sorted(environment.needs_columns):
        value = row.get(name)
        if value is not None and str(value).strip():
            continue
        what = f"the first row has an empty {name}" if name in columns else f"the rows have {', '.join(columns)}"
        fix = did_you_mean(name, columns) or foreign_words("column", columns)
        fix = fix or f"give the rows a column {name}, or say which it is: data: {{…, {name}_column: …}}"
        yield ConfigIssue("data", f"{environment.owner} needs the column {name}; {what}", fix)


def _column_problems(environment: Environment, row: Row) -> Iterator[ConfigIssue]:
    """Parameters of a reward function that no column fills."""
    if not isinstance(environment, RewardFunction):
        return
    columns = [str(name) for name in row]
    for name in sorted(environment.required_columns() - {"answer", *columns}):
        fix = (
            did_you_mean(name, columns)
            or foreign_words("column", [name])
            or "map a column to it in `data:`, or give the parameter a default"
        )
        owner = f"reward function {environment.name!r}"
        yield ConfigIssue("reward_fn", f"{owner} asks for {name}; the rows have {', '.join(columns)}", fix)


def _rehearse(environment: Environment, row: Row, warn: Callable[[str], None]) -> None:
    prompt = to_prompt(row, 0, _NoTokens())
    response = prompt.answer or TRIAL_RESPONSE
    raised = _in_time(lambda: _score(environment, prompt, response))
    if raised is None:
        return
    if isinstance(raised, (NemorlError, *SURE_MISTAKES)):
        with boundary(f"reward function {environment.name!r}, tried on the first row,"):
            raise raised
    what = f"{type(raised).__name__}: {raised} for the first row and the response {shown(response)}"
    place = place_of(raised)
    warn(f"reward function {environment.name!r} raised {what}{f'; look at {place}' if place else ''}")


def _score(environment: Environment, prompt: Prompt, response: str) -> None:
    function = environment if isinstance(environment, RewardFunction) else None
    result = environment.score(prompt, response) if function is None else function.tried(prompt, response)
    if inspect.iscoroutine(result):
        result.close()  # it would run on another loop than the run's, and may call a service
    elif inspect.isawaitable(result):
        pass
    elif function is not None:
        function.checked(result)
    else:
        as_score(result, owner=f"environment {environment.name!r}")


def _in_time(call: Callable[[], None]) -> Exception | None:
    """The error that the call raised; ``None`` where it returned, or is still at work after the time that it has."""
    raised: list[Exception] = []

    def run() -> None:
        try:
            call()
        except Exception as error:
            raised.append(error)

    thread = threading.Thread(target=run, name="reward-rehearsal", daemon=True)
    thread.start()
    thread.join(REHEARSAL_TIMEOUT_S)
    return raised[0] if raised else None
