"""ChatCodec: how one model writes messages, tools and answers. Codecs keep no state: all episodes share one."""

from __future__ import annotations

import json
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol

from nemorl_rl.agents.contract import ChatMessage

if TYPE_CHECKING:
    from nemorl_media.family import Family

    from nemorl_rl.data.tokenizer import Tokenizer

Tools = Sequence[Mapping[str, Any]]
"""Tools as OpenAI's chat completions write them: ``{"type": "function", "function": {"name": …, "parameters": …}}``."""


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
    """Number of texts that look like a call and cannot be read; they stay in ``content``."""


@dataclass(frozen=True, slots=True)
class Spoken:
    """A conversation up to and including an answer of the policy, as messages and as tokens."""

    messages: Sequence[ChatMessage]
    """Plain; the last one is the answer."""
    prompt_ids: Sequence[int]
    answer_ids: Sequence[int]
    """As sampled."""

    @property
    def token_ids(self) -> tuple[int, ...]:
        return (*self.prompt_ids, *self.answer_ids)


class ChatCodec(Hashable, Protocol):
    """Messages to tokens and back. All tokens are those of the policy's tokenizer.

    A codec is asked by many threads at once. Plain messages are those of ``nemorl_rl.chat.messages``.
    """

    @property
    def family(self) -> Family | None:
        """How the model sees or hears; ``None`` where it reads text alone."""
        ...

    def with_options(self, options: Mapping[str, Any]) -> ChatCodec:
        """The codec of the same model whose template is given these variables, over those that it has."""
        ...

    def render(self, messages: Sequence[ChatMessage], tools: Tools) -> tuple[int, ...]:
        """The whole history as the model's template writes it, ending where the assistant begins to speak.

        Args:
            messages: As clients send them, or plain.
            tools: That may be called.

        Raises:
            DataError: The template refuses these messages, or cannot show tools.
        """
        ...

    def extend(self, spoken: Spoken, messages: Sequence[ChatMessage], tools: Tools) -> tuple[int, ...] | None:
        """The continuation of an answer's tokens when these messages come after it.

        It closes the answer where that was cut, and ends where the assistant begins to speak. ``None`` where the
        template would write what is already there in another way for these messages, or it cannot be known. That
        earlier reasoning would not be written again is no such reason.

        Args:
            spoken: What was said, the answer being its end.
            messages: New ones, plain. Those of the assistant were not sampled here.
            tools: As in ``render``.
        """
        ...

    def parse(self, token_ids: Sequence[int], prompt_ids: Sequence[int], tools: Tools) -> ParsedAnswer:
        """The message in sampled tokens. Never raises for what a model writes.

        Args:
            token_ids: As sampled.
            prompt_ids: Before them: it may have begun the reasoning.
            tools: That may be called. Without any, nothing is taken for a call.
        """
        ...


@lru_cache(maxsize=64)
def codec_with(codec: ChatCodec, template_options: str) -> ChatCodec:
    """``codec.with_options`` of a JSON object; made once for all episodes, since a codec probes its template."""
    return codec.with_options(json.loads(template_options))


def codec_of(tokenizer: Tokenizer, renderer: str | None = None) -> ChatCodec:
    """The codec of a tokenizer's model.

    Args:
        tokenizer: Of the model.
        renderer: Of the package ``renderers``, by name. Unset: the model's own chat template, or the renderer of its
            family where nemorl does not read that family's answers itself (gpt-oss, Gemma 4, …).

    Raises:
        BackendError: It needs the package ``renderers``, which is not installed.
        UsageError: There is no such renderer.
    """
    from nemorl_rl.chat.renderer import RendererCodec, renderer_of
    from nemorl_rl.chat.template import TemplateCodec

    chosen = renderer or renderer_of(str(tokenizer.inner.chat_template or ""))
    return TemplateCodec(tokenizer) if chosen is None else RendererCodec(tokenizer, chosen)
