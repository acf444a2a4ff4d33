"""Api: what the server asks of one; and asking the policy, which they share."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol, TypeVar

from nemorl.types import Completion
from nemorl_rl.agents.contract import CallOptions, ChatMessage, ChatReply, ConstraintError, ToolChoice
from nemorl_rl.chat.text import TextCoder

from nemorl_agents.gateway.body import list_at
from nemorl_agents.gateway.calls import Answer
from nemorl_agents.gateway.episodes import OpenEpisode
from nemorl_agents.gateway.errors import RequestError, TooLongError, bad_field, unsupported
from nemorl_agents.gateway.fields import Field

T = TypeVar("T")

PIECE = 256
"""Characters of one event of a stream."""


class ErrorWords(Protocol):
    """How an API, or a family of them, words errors."""

    def body(self, error: RequestError, request_id: str) -> Mapping[str, Any]: ...

    def event(self, error: RequestError, request_id: str) -> bytes:
        """An error in a stream that has begun."""
        ...


class Api(Protocol):
    """One endpoint that is answered by the policy."""

    path: ClassVar[str]
    """After the base URL."""
    fields: ClassVar[Mapping[str, Field]]
    """The treatment of each field of its body."""
    errors: ClassVar[ErrorWords]

    async def answer(self, body: Mapping[str, Any], episode: OpenEpisode) -> Answer:
        """Ask the policy.

        Args:
            body: Fields that are honoured.
            episode: Who asks.

        Raises:
            RequestError: The body makes no sense.
            EpisodeError: As ``EpisodePolicy.chat`` does.
        """
        ...


@dataclass(frozen=True, slots=True)
class Question:
    """A request to a chat-like API."""

    messages: tuple[ChatMessage, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    tool_choice: ToolChoice = "auto"
    one_call: bool = False
    """No two tool calls in one answer are wanted. It cannot be enforced, and is counted."""
    format_field: str = "response_format"
    """The name by which its API asks for a format."""


@dataclass(frozen=True, slots=True)
class Said:
    """An answer as clients get it."""

    content: str
    reasoning: str
    tool_calls: tuple[Mapping[str, Any], ...]
    finish_reason: Literal["stop", "length", "tool_calls"]
    stopped_by: str | None
    """The client's own string that ended it, where the tokenizer is there to tell."""
    reply: ChatReply

    @property
    def message(self) -> dict[str, Any]:
        """As a message of the history."""
        optional = {"reasoning_content": self.reasoning, "tool_calls": [*self.tool_calls]}
        content = self.content or (None if self.tool_calls else "")
        return {"role": "assistant", "content": content, **{name: one for name, one in optional.items() if one}}

    @property
    def output_tokens(self) -> int:
        return len(self.reply.completion.token_ids)


async def ask(episode: OpenEpisode, question: Question, options: CallOptions) -> Said:
    """The policy's answer, and what there is to count of it."""
    try:
        reply = await episode.policy.chat(
            question.messages, tools=question.tools, tool_choice=question.tool_choice, options=options
        )
    except ConstraintError as error:
        raise unsupported(question.format_field, error.message, fix=error.fix or "leave it out") from None
    calls = tuple(reply.message.get("tool_calls") or ())
    episode.traffic.broken_tool_choices += reply.broke_tool_choice or (question.one_call and len(calls) > 1)
    episode.traffic.malformed_tool_calls += reply.malformed_tool_calls
    reasoning = str(reply.message.get("reasoning_content") or "")
    stop = _stop_of(reply, options.stop, episode.policy.text)
    return Said(reply.text, reasoning, calls, reply.finish_reason, stop, reply)


def _stop_of(reply: ChatReply, stops: Sequence[str], coder: TextCoder | None) -> str | None:
    if not stops or coder is None or reply.finish_reason != "stop":
        return None
    return cut_at(coder.decode(reply.completion.token_ids), stops)[1]


def cut_at(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """Text before the first of these strings in it, and that string."""
    found = [(text.index(stop), stop) for stop in stops if stop in text]
    if not found:
        return text, None
    place, stop = min(found)
    return text[:place], stop


async def all_of(works: Sequence[Awaitable[T]]) -> list[T]:
    """All results; where one fails, the others are cancelled."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


# Messages


def messages_at(value: Any, place: str) -> list[Any]:
    """A list that is not empty."""
    found = list_at(value, place)
    if not found:
        raise bad_field(place, "is empty", fix="send at least one message")
    return found


# Answers


def new_id(prefix: str) -> str:
    return f"{prefix}{secrets.token_hex(12)}"


def pieces(text: str) -> Iterator[str]:
    """A text in parts of one event each."""
    return (text[start : start + PIECE] for start in range(0, len(text), PIECE))


def event(data: Mapping[str, Any], name: str | None = None) -> bytes:
    """A server-sent event."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(data, ensure_ascii=False, separators=(',', ':'))}\n\n".encode()


def fingerprint(completion: Completion) -> str:
    """Which weights answered, where APIs name the state of the system."""
    return f"weights-{completion.weight_version}"


# Errors as OpenAI words them


TYPES = {401: "authentication_error", 429: "rate_limit_error", 500: "server_error"}


class OpenAIErrors:
    """Of chat completions, completions and, with other events, responses."""

    def __init__(self, *, names_events: bool = False) -> None:
        """
        Args:
            names_events: Events have a name, and an error is one of its own.
        """
        self._names_events = names_events

    def body(self, error: RequestError, request_id: str) -> Mapping[str, Any]:
        facts = {
            "message": self._message(error),
            "type": TYPES.get(error.status, "invalid_request_error"),
            "param": error.param,
            "code": error.code,
        }
        return {"error": facts}

    def event(self, error: RequestError, request_id: str) -> bytes:
        if not self._names_events:
            return event(self.body(error, request_id))
        told = {"type": "error", "code": error.code, "message": self._message(error), "param": error.param}
        return event({**told, "sequence_number": 0}, "error")

    @staticmethod
    def _message(error: RequestError) -> str:
        if isinstance(error, TooLongError):
            return (
                f"This model's maximum context length is {error.limit} tokens. However, your messages resulted in "
                f"{error.prompt_tokens} tokens. Please reduce the length of the messages."
            )
        return error.text
