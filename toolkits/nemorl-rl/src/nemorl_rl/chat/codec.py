"""ChatCodec: how one model writes messages, tools and answers. Codecs keep no state: all episodes share one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from nemorl.types import Message

from nemorl_rl.agents.contract import ChatMessage
from nemorl_rl.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call as the policy wrote it.

    Example:
        >>> ToolCall("add", '{"a": 1, "b": 2}').name
        'add'
    """

    name: str
    arguments: str
    """JSON, byte for byte as it was written where the model writes JSON."""


@dataclass(frozen=True, slots=True)
class ParsedAnswer:
    """An answer taken apart.

    Example:
        >>> ParsedAnswer("4").tool_calls
        ()
    """

    content: str
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    malformed_tool_calls: int = 0
    """What looks like a call and cannot be read; it stays in ``content``."""


class ChatCodec(Protocol):
    """Messages to tokens and back. All tokens are those of the policy's tokenizer."""

    def render(self, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        """The whole history as the model's template writes it, ending where the assistant begins to speak.

        Raises:
            DataError: The template refuses these messages.
        """
        ...

    def extend(
        self, token_ids: Sequence[int], messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]]
    ) -> tuple[int, ...] | None:
        """What follows ``token_ids``, a prompt and the answer to it, when these messages come after the answer.

        It closes the answer where that was cut, and ends where the assistant begins to speak. ``None`` where the
        template would write what is already there in another way for these messages (or it cannot be known).

        Args:
            token_ids: A rendered prompt and the tokens sampled after it.
            messages: New ones, none of the assistant.
            tools: As in ``render``.
        """
        ...

    def parse(self, token_ids: Sequence[int], prompt_ids: Sequence[int]) -> ParsedAnswer:
        """The message in sampled tokens. Never raises for what a model writes."""
        ...


class TemplateCodec:
    """A model's own chat template, without tools."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def render(self, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        plain: list[Message] = [{"role": str(m["role"]), "content": str(m["content"] or "")} for m in messages]
        return tuple(self._tokenizer.encode_prompt(plain))

    def extend(
        self, token_ids: Sequence[int], messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]]
    ) -> tuple[int, ...] | None:
        return None

    def parse(self, token_ids: Sequence[int], prompt_ids: Sequence[int]) -> ParsedAnswer:
        return ParsedAnswer(self._tokenizer.decode(token_ids))


def codec_of(tokenizer: Tokenizer) -> ChatCodec:
    """The codec of a tokenizer's model."""
    return TemplateCodec(tokenizer)
