"""TextCoder: text and tokens of the policy's model, where an API needs them: ``/v1/completions``, log-probs, counts."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol

from nemorl.media import MediaKind

from nemorl_rl.agents.contract import ChatMessage
from nemorl_rl.chat.codec import ChatCodec
from nemorl_rl.chat.media import process_items
from nemorl_rl.chat.messages import plain_messages
from nemorl_rl.data.tokenizer import Tokenizer


class TextCoder(Protocol):
    """Text to tokens and back."""

    @property
    def vocabulary(self) -> int:
        """Token ids are below this."""
        ...

    @property
    def kinds(self) -> Collection[MediaKind]:
        """Of images and sounds those that the model takes; none where it reads text alone."""
        ...

    def encode(self, text: str) -> Sequence[int]: ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Without special tokens."""
        ...

    def token(self, token_id: int) -> str:
        """One token, a special one too. Bytes that are no character by themselves are ``\\ufffd``."""
        ...

    def count(self, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]], limit: int) -> int:
        """Tokens of a prompt, as the model's template writes it.

        Raises:
            ContextOverflowError: Its images and sounds alone have more than ``limit``.
        """
        ...


class TokenizerText:
    """The ``TextCoder`` of a tokenizer."""

    def __init__(self, tokenizer: Tokenizer, codec: ChatCodec) -> None:
        self._tokenizer, self._codec = tokenizer, codec

    @cached_property
    def vocabulary(self) -> int:
        return len(self._tokenizer.inner)

    @cached_property
    def kinds(self) -> Collection[MediaKind]:
        family = self._codec.family
        return frozenset[MediaKind]() if family is None else frozenset(family.placeholders)

    def encode(self, text: str) -> Sequence[int]:
        return self._tokenizer.encode(text)

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids)

    def token(self, token_id: int) -> str:
        return self._tokenizer.token(token_id)

    def count(self, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]], limit: int) -> int:
        plain = plain_messages(messages, self._codec.family)
        process_items(plain, self._codec.family, limit)
        return len(self._codec.render(plain, tuple(tools)))
