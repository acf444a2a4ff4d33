"""A policy that says what it is told to, for tests of what is around a policy: nothing of it is sampled."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nemorl.media import Media
from nemorl.types import Completion
from nemorl_rl.agents.contract import (
    AS_THE_RUN,
    CallOptions,
    ChatMessage,
    ChatReply,
    EpisodeLimits,
    ToolChoice,
)

LIMITS = EpisodeLimits(max_sequence_tokens=4096, max_new_tokens=512, max_calls=100, timeout_s=60.0)


@dataclass(frozen=True)
class Asked:
    """One call, as the policy got it."""

    messages: Sequence[ChatMessage]
    tools: Sequence[Mapping[str, Any]]
    tool_choice: ToolChoice
    options: CallOptions


def saying(content: str | None = "", *, sampled: str | None = None, prompt_tokens: int = 12, **facts: Any) -> ChatReply:
    """A reply whose tokens are bytes, each worth -0.5 nats.

    Args:
        content: Text, if any.
        sampled: The text of its tokens. Unset: the content.
        prompt_tokens: Of the question.
        **facts: ``reasoning_content`` and ``tool_calls`` of the message; other names are fields of ``ChatReply``.
    """
    extra = {name: facts.pop(name) for name in ("reasoning_content", "tool_calls") if name in facts}
    ids = tuple((sampled or content or "").encode())
    completion = Completion(ids, (-0.5,) * len(ids), "stop", (7,))
    message = {"role": "assistant", "content": content, **extra}
    return ChatReply(message, completion, prompt_tokens, **facts)


def calling(name: str, arguments: str, *, call_id: str = "call_1") -> Mapping[str, Any]:
    """A call of a tool in a message."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


class ByteText:
    """Each byte is a token."""

    vocabulary = 256
    kinds = ()

    def encode(self, text: str) -> Sequence[int]:
        return [*text.encode()]

    def decode(self, token_ids: Sequence[int]) -> str:
        return bytes(token_ids).decode(errors="replace")

    def token(self, token_id: int) -> str:
        return self.decode([token_id])

    def count(self, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]], limit: int) -> int:
        return sum(len(str(message["content"]).encode()) for message in messages) + len(json.dumps([*tools]))


@dataclass
class ScriptedPolicy:
    """Answers with ``say``, called with what was asked; an exception that it raises is raised."""

    say: Callable[[Asked], ChatReply | Awaitable[ChatReply]] = lambda asked: saying("4")
    episode_id: str = "episode 0.0"
    limits: EpisodeLimits = LIMITS
    text: Any = field(default_factory=ByteText)
    asked: list[Asked] = field(default_factory=list)
    cancelled: int = 0
    """Calls that were cancelled while they waited."""
    rewards: list[tuple[Completion | None, float]] = field(default_factory=list)
    """Given to answers, in order."""

    async def chat(
        self,
        messages: Sequence[ChatMessage],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        tool_choice: ToolChoice = "auto",
        options: CallOptions = AS_THE_RUN,
    ) -> ChatReply:
        asked = Asked(messages, tools, tool_choice, options)
        self.asked.append(asked)
        reply = self.say(asked)
        if isinstance(reply, ChatReply):
            return reply
        try:
            return await reply
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

    async def complete(
        self, token_ids: Sequence[int], media: Sequence[Media] = (), *, options: CallOptions = AS_THE_RUN
    ) -> Completion:
        reply = await self.chat([{"role": "user", "content": bytes(token_ids).decode()}], options=options)
        return reply.completion

    def reward(self, value: float, completion: Completion | None = None) -> float:
        self.rewards.append((completion, value))
        return sum(given for answer, given in self.rewards if answer is completion)
