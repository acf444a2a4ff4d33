"""A Python coroutine per episode, and the built-in loop of tool calls."""

from __future__ import annotations

import asyncio
import inspect
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

from nemorl.contracts.environment import as_score
from nemorl.errors import UsageError
from nemorl.media import MediaKind
from nemorl.types import Prompt, Score
from nemorl_rl.agents.contract import ChatMessage, EpisodeError, EpisodePolicy
from nemorl_rl.agents.outcomes import Ending
from nemorl_rl.agents.watched import WatchedPolicy

from nemorl_agents.programs.episode import Episode
from nemorl_agents.programs.judging import Play
from nemorl_agents.programs.tools import Toolbox

Rollout = Callable[..., Awaitable[Any]]
OpenTools = Callable[[Collection[MediaKind]], AbstractAsyncContextManager[Toolbox]]
"""The tools of one episode, for a model that takes items of these kinds."""


class Coroutines:
    """Awaits a coroutine function, once per episode."""

    def __init__(self, function: Rollout, open_tools: OpenTools) -> None:
        """
        Args:
            function: ``async def rollout(prompt, policy)``; gets the tools too where it has a parameter ``tools``.
            open_tools: The tools of one episode.

        Raises:
            UsageError: It is no such function.
        """
        parameters = parameters_of(function)
        self._function, self._open_tools, self._wants_tools = function, open_tools, "tools" in parameters

    @asynccontextmanager
    async def play(self, prompt: Prompt, policy: WatchedPolicy, timeout_s: float) -> AsyncIterator[Play]:
        outcome: Ending = "finished"
        result: Any = None
        problem, metrics = "", dict[str, float]()
        try:
            async with asyncio.timeout(timeout_s) as limit:
                result, metrics = await self._result(prompt, policy)
        except TimeoutError:
            outcome, problem = ("timeout", "") if limit.expired() else ("crashed", traceback.format_exc())
        except EpisodeError as error:
            outcome, problem = "stopped", str(error)
        except UsageError:
            raise  # of the config: tools that cannot be had, and the like
        except Exception:
            outcome, problem = "crashed", traceback.format_exc()
        if outcome == "finished" and not policy.answers:
            outcome = "no_calls"
        episode = Episode(outcome, stderr=problem, messages=tuple(policy.messages))
        answer = result if isinstance(result, str) else episode.last_message
        yield Play(episode, answer, _score(result), metrics)

    async def _result(self, prompt: Prompt, policy: WatchedPolicy) -> tuple[Any, dict[str, float]]:
        if not self._wants_tools:
            return await self._function(prompt, policy), {}
        async with self._open_tools(policy.text.kinds if policy.text is not None else ()) as tools:
            result = await self._function(prompt, policy, tools=tools)
        return result, {"tool_calls": float(tools.calls), "tool_errors": float(tools.errors)}

    def close(self) -> None:
        """Nothing is held between episodes."""


def parameters_of(function: Rollout) -> Mapping[str, inspect.Parameter]:
    """Those of a coroutine function that can play an episode.

    Raises:
        UsageError: It is no such function.
    """
    name = getattr(function, "__name__", repr(function))
    if not inspect.iscoroutinefunction(function):
        raise UsageError(f"{name} is not async", fix="write async def rollout(prompt, policy), and await in it")
    parameters = inspect.signature(function).parameters
    if len(parameters) - ("tools" in parameters) < 2:
        raise UsageError(f"{name} takes {len(parameters)} parameter(s)", fix="write it as rollout(prompt, policy)")
    return parameters


def _score(result: Any) -> Score | None:
    """The score that a coroutine returned; ``None`` where it left that to the reward."""
    return None if result is None or isinstance(result, str) else as_score(result, owner="the coroutine")


def chat_loop(system: str | None) -> Rollout:
    """The simplest agent: ask the policy, answer its tool calls, and ask again until a message has none."""

    async def rollout(prompt: Prompt, policy: EpisodePolicy, tools: Toolbox) -> str:
        messages: list[ChatMessage] = first_messages(prompt, system)
        while True:
            reply = await policy.chat(messages, tools=tools.specs)
            messages.append(reply.message)
            calls: Sequence[Any] = reply.message.get("tool_calls") or ()
            if not calls:
                return reply.text
            messages += await tools.messages(calls)

    return rollout


def first_messages(prompt: Prompt, system: str | None) -> list[ChatMessage]:
    """The task as a chat."""
    messages: list[ChatMessage] = [*prompt.messages] or [{"role": "user", "content": prompt.text}]
    has_system = any(message["role"] == "system" for message in messages)
    return messages if system is None or has_system else [{"role": "system", "content": system}, *messages]
