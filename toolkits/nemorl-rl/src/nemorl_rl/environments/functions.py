"""A plain function as an environment: one response at a time, or all of a turn at once."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence, Sized
from typing import Any

from nemorl.contracts.environment import Environment, as_score
from nemorl.errors import UsageError
from nemorl.plugins.slots import foreign_words
from nemorl.types import Prompt, Score

from nemorl_rl.environments.batching import Batcher

BATCH_NAMES = ["prompts", "responses"]
"""First two parameters of a function that is recognised as batched."""


class RewardFunction(Environment):
    """A plain function as an environment.

    The function takes ``prompt`` and ``response`` (positionally, as text) and, by name, any columns of the dataset
    row that its signature asks for, ``answer`` included; ``**columns`` gets them all. It returns a number, several
    (``{"correct": 1.0, "format": 0.5}``, or a list), a :class:`Score`, or a coroutine.

    A function of ``prompts`` and ``responses`` is *batched*: it is called with the lists of a whole turn, columns come
    as lists too, and it returns one of these per response, in order, or a list for each part: ``{"correct": [1, 0]}``.

    Example:
        >>> def brevity(prompts, responses):
        ...     return [-len(response) / 1000 for response in responses]
        >>> RewardFunction(brevity).batched
        True
    """

    def __init__(self, function: Callable[..., Any], *, name: str | None = None, batched: bool | None = None) -> None:
        """
        Args:
            function: What computes the rewards.
            name: How errors and thread names call it. Unset: its own.
            batched: Whether it takes lists. Unset: whether its first parameters are named ``prompts, responses``.
        """
        self.name = name or str(getattr(function, "__name__", type(function).__name__))
        parameters = list(inspect.signature(function).parameters.values())
        positional = [p.name for p in parameters[:2] if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        if len(positional) < 2:
            raise UsageError(
                f"reward function {self.name!r} takes {len(positional)} argument(s) by position, not two",
                fix="write it as f(prompt, response), plus dataset columns by name if it needs them",
            )
        if batched is None and (convention := foreign_words("reward", [" ".join(p.name for p in parameters)])):
            raise UsageError(f"reward function {self.name!r} is in another convention", fix=convention)
        self.batched = positional == BATCH_NAMES if batched is None else batched
        self._bind(function, parameters[2:], frozenset(positional))

    has_side_effects = False
    may_abstain = False
    """True: where it gives no score, the other rewards of a sum still count."""

    def _bind(self, function: Callable[..., Any], rest: Sequence[inspect.Parameter], reserved: frozenset[str]) -> None:
        """The function, its parameters that columns fill, and names that no column fills."""
        self.function, self._reserved = function, reserved
        self._columns = tuple(p.name for p in rest if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))
        self._required = frozenset(p.name for p in rest if p.name in self._columns and p.default is p.empty)
        self._takes_all = any(p.kind is p.VAR_KEYWORD for p in rest)
        self._batcher: Batcher[tuple[Prompt, str], Score] = Batcher(self._score_batch)

    def required_columns(self) -> frozenset[str]:
        """Columns without which the function cannot be called."""
        return self._required

    def score(self, prompt: Prompt, response: str) -> float | Score | Awaitable[float | Score]:
        if not isinstance(response, str):
            raise UsageError(
                f"reward function {self.name!r} was asked for the score of a {type(response).__name__}, not of a text",
                fix="score one response at a time; for TRL's convention, lists in and a list out: @nemorl.trl_reward",
            )
        return self._batcher.ask((prompt, response)) if self.batched else self._call(prompt, response)

    def tried(self, prompt: Prompt, response: str) -> object:
        """The raw result for one response, or for a batch of one if the function takes batches. Starts no coroutine."""
        return self._call_batch([(prompt, response)]) if self.batched else self._call(prompt, response)

    def checked(self, result: object) -> None:
        """Refuse what ``tried`` returned where it is no reward.

        Raises:
            UsageError: says what it is.
        """
        if self.batched:
            self._scores(result, 1)
        else:
            as_score(result, owner=f"reward function {self.name!r}")

    def _call(self, prompt: Prompt, response: str) -> float | Score | Awaitable[float | Score]:
        row = _row(prompt)
        extra = {name: row[name] for name in self._wanted(row) if name in row}
        result: float | Score | Awaitable[float | Score] = self.function(prompt.text, response, **extra)
        return result

    def _score_batch(self, asks: list[tuple[Prompt, str]]) -> Sequence[Score] | Awaitable[Sequence[Score]]:
        result = self._call_batch(asks)
        return self._later(result, len(asks)) if isinstance(result, Awaitable) else self._scores(result, len(asks))

    def _call_batch(self, asks: list[tuple[Prompt, str]]) -> Any:
        texts = [prompt.text for prompt, _ in asks]
        return self.function(texts, [response for _, response in asks], **self._column_lists(asks))

    def _column_lists(self, asks: list[tuple[Prompt, str]]) -> dict[str, list[Any]]:
        """The columns to pass by name, a value per response."""
        rows = [_row(prompt) for prompt, _ in asks]
        present = dict.fromkeys(name for row in rows for name in row)
        # A column that some rows lack is None there; one that all lack is left to the function's default.
        return {name: [row.get(name) for row in rows] for name in self._wanted(present) if name in present}

    async def _later(self, result: Awaitable[Any], count: int) -> Sequence[Score]:
        return self._scores(await result, count)

    def _scores(self, results: Any, count: int) -> Sequence[Score]:
        owner = f"reward function {self.name!r}"
        if (
            isinstance(results, Mapping)
            and results
            and all(isinstance(part, list | tuple) for part in results.values())
        ):
            results = self._rows(results, count)
        # Strings are iterable, and so is a single number in a tensor of no dimension, until one tries.
        if isinstance(results, str | Mapping) or not isinstance(results, Iterable) or not isinstance(results, Sized):
            seen = f"{type(results).__name__}, not a list"
        elif len(results) != count:
            seen = f"{len(results)} reward(s)"
        else:
            return [as_score(result, owner=owner) for result in results]
        raise UsageError(
            f"{owner} was called with {count} response(s) and returned {seen}",
            fix="return a list of one number per response, in the order of `responses`",
        )

    def _rows(self, columns: Mapping[str, Sequence[Any]], count: int) -> list[dict[str, Any]]:
        """A list of rewards under each name, as the rewards of each response."""
        for name, column in columns.items():
            if len(column) != count:
                raise UsageError(
                    f"{self.name!r} returned {len(column)} reward(s) as {name!r} for {count} response(s)",
                    fix="return a list of one number per response under each name",
                )
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]

    def _wanted(self, row: Iterable[str]) -> list[str]:
        """Columns to pass by name."""
        names = [*self._columns, *row] if self._takes_all else self._columns
        return [name for name in dict.fromkeys(names) if name not in self._reserved]


FunctionalRewardWrapper = RewardFunction
"""The same class under the name that NeMo RL uses.

Example:
    >>> FunctionalRewardWrapper(lambda prompt, response: 1.0).batched
    False
"""


def _row(prompt: Prompt) -> Mapping[str, Any]:
    return {"answer": prompt.answer, **prompt.row}
