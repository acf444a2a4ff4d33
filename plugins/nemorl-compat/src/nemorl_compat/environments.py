"""``EnvironmentInterface``: environments that are stepped in batches, as an ``nemorl.Environment``.

``step`` is called once per turn with all conversations that are waiting. There is no Ray actor: a run's pool calls it
in a thread, and ``fit(reward_fn=MyEnvironment())`` takes the object as it is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from nemorl import Environment
from nemorl.errors import UsageError
from nemorl.types import Prompt, Score, Step
from nemorl_rl.environments.batching import Batcher

MessageLog = list[dict[str, str]]
"""A conversation so far: ``{"role": "user" | "assistant" | "environment", "content": …}``."""


class EnvironmentReturn(NamedTuple):
    """The result of ``step``, one entry per conversation, in order."""

    observations: Sequence[Mapping[str, str]]
    """The messages that the policy reads next, ``{"role": …, "content": …}``. Empty: nothing, for all of them."""
    metadata: Sequence[Any]
    """Handed back to the next ``step`` of the same conversation."""
    next_stop_strings: Sequence[Any]
    """Not used: stop strings are those of the run's generation settings."""
    rewards: Any
    """[B] numbers, or a mapping of named parts to [B] numbers, which add up."""
    terminateds: Any
    """[B] whether the conversation is over."""
    answers: Sequence[str | None] | None = None
    """The answer of each response, for majority votes."""


class EnvironmentInterface(Environment, ABC):
    """Base class of environments that are stepped in batches."""

    batched = True

    @abstractmethod
    def step(self, message_log_batch: list[MessageLog], metadata: list[Any]) -> EnvironmentReturn:
        """Score the latest response of each conversation.

        Args:
            message_log_batch: Conversations, each ending in the assistant's response.
            metadata: Of each, what the last ``step`` returned. At first: the row's ``extra_env_info``, else all its
                columns and ``ground_truth``, its answer.
        """

    def global_post_process_and_metrics(self, batch: Any) -> tuple[Any, dict[str, float]]:
        """Kept for callers of their own: a run computes its metrics from ``Score.metrics`` instead."""
        return batch, {}

    def start(self, prompt: Prompt) -> _Conversation:
        return _Conversation(prompt, self._batcher)

    @cached_property
    def _batcher(self) -> Batcher[_Ask, _Answer]:
        return Batcher(self._step_all)

    def _step_all(self, asks: list[_Ask]) -> Sequence[_Answer]:
        result = self.step([list(ask.messages) for ask in asks], [ask.metadata for ask in asks])
        name, count = f"{type(self).__name__}.step", len(asks)
        if isinstance(result.rewards, Mapping):
            columns = {part: _column(name, part, rewards, count) for part, rewards in result.rewards.items()}
            rows = zip(*columns.values(), strict=True)
            components = [dict(zip(columns, map(float, row), strict=True)) for row in rows]
            rewards = [sum(parts.values(), 0.0) for parts in components]
        else:
            components = [{} for _ in asks]
            rewards = [float(reward) for reward in _column(name, "rewards", result.rewards, count)]
        metadata = _column(name, "metadata", result.metadata, count)
        done = _column(name, "terminateds", result.terminateds, count)
        answers = _column(name, "answers", result.answers or [None] * count, count)
        observations = _column(name, "observations", result.observations or [None] * count, count)
        return [
            _Answer(Score(reward, parts, answer=answer), observation, bool(over), data)
            for reward, parts, answer, observation, over, data in zip(
                rewards, components, answers, observations, done, metadata, strict=True
            )
        ]


class _Ask(NamedTuple):
    messages: MessageLog
    metadata: Any


class _Answer(NamedTuple):
    score: Score
    observation: Mapping[str, str] | None
    is_over: bool
    metadata: Any


class _Conversation:
    """One episode: a message log and the environment's metadata of it."""

    def __init__(self, prompt: Prompt, batcher: Batcher[_Ask, _Answer]) -> None:
        self._batcher = batcher
        turns = prompt.messages or ({"role": "user", "content": prompt.text},)
        self._messages: MessageLog = [dict(turn) for turn in turns]
        own = {**prompt.row, "ground_truth": prompt.answer}
        self._metadata = prompt.row.get("extra_env_info", own)

    def step(self, response: str) -> Awaitable[Step]:
        self._messages.append({"role": "assistant", "content": response})
        # Asked now, awaited later: all conversations of a turn are in one call.
        return self._receive(self._batcher.ask(_Ask(self._messages, self._metadata)))

    async def _receive(self, pending: Awaitable[_Answer]) -> Step:
        answer = await pending
        self._metadata = answer.metadata
        if answer.observation is None or answer.is_over:
            return Step(answer.score)
        self._messages.append(dict(answer.observation))
        return Step(answer.score, answer.observation["content"], done=False)


def _column(owner: str, name: str, given: Any, count: int) -> list[Any]:
    """A list or tensor of ``count`` entries as a list."""
    entries = list(given)
    if len(entries) != count:
        raise UsageError(
            f"{owner} was given {count} conversation(s) and returned {len(entries)} {name}",
            fix="return one entry per conversation, in order",
        )
    return entries
