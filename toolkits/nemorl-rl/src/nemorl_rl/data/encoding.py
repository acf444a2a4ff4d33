"""Dataset rows as token sequences: demonstrations and preference pairs. What is learnt from them is up to algorithms.

Prompts that are only to be answered are the business of ``nemorl_rl.data.rows``; columns that go by other names, of
datasets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from nemorl.errors import DataError
from nemorl.media import Media
from nemorl.plugins.slots import foreign_words
from nemorl.types import Message, Row

from nemorl_rl.chat.codec import Tools
from nemorl_rl.chat.media import with_media
from nemorl_rl.chat.rows import text_of, tools_of
from nemorl_rl.data.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class EncodedPair:
    """Two responses to one prompt. A sequence is ``prompt + chosen`` or ``prompt + rejected``."""

    prompt: list[int]
    chosen: list[int]
    """Response tokens, those that end it included; never empty."""
    rejected: list[int]
    media: tuple[Media, ...] = ()
    """Images and sounds in any of them."""


class EncodedRow(NamedTuple):
    """A demonstration as tokens."""

    ids: list[int]
    mask: list[bool]
    """True where the token is to be learnt"""
    media: tuple[Media, ...] = ()
    """Images and sounds in it"""

    def cut(self, limit: int) -> EncodedRow:
        """Its first ``limit`` tokens. Of an item that is cut nothing is computed: no token after it is learnt."""
        return EncodedRow(self.ids[:limit], self.mask[:limit], self.media)


def encode_response(
    prompt: str | Sequence[Message], response: str, tokenizer: Tokenizer, tools: Tools = ()
) -> tuple[list[int], list[int]]:
    """Tokens of a prompt and of a finished response to it.

    Messages go through the chat template, which ends the response; to plain text the end-of-sequence token is added.
    """
    if isinstance(prompt, str):
        target = tokenizer.encode_observation(response) + sorted(tokenizer.stop_token_ids)
        return tokenizer.encode(prompt), target
    spoken = tokenizer.chat.encode([*prompt, {"role": "assistant", "content": response}], tools)
    start = spoken.start(len(prompt))
    return spoken.ids[:start], spoken.ids[start:]


def encode_pair(row: Row, tokenizer: Tokenizer) -> EncodedPair:
    """The tokens of a row with ``prompt`` (text or messages), ``chosen`` and ``rejected``: each text, or a list of the
    assistant's message. Without a prompt, both are whole conversations that differ in the last message.

    Raises:
        DataError: the row has another shape.
    """
    row = with_media(row, tokenizer.family)
    prompt, replies = _preference(row)
    if isinstance(prompt, str):
        (ids, best), (_, worst) = (encode_response(prompt, _text_reply(reply), tokenizer) for reply in replies)
        return EncodedPair(ids, *_filled(best, worst))
    tools = tools_of(row)
    chosen, rejected = (tokenizer.chat.encode([*prompt, reply], tools) for reply in replies)
    start = min(chosen.start(len(prompt)), rejected.start(len(prompt)))
    if chosen.ids[:start] != rejected.ids[:start]:
        raise DataError(
            "the chat template writes the prompt in one way before `chosen` and in another before `rejected`, so they "
            "are not two responses to one prompt",
            fix="leave such rows out, or use a template that does not look ahead (policy.tokenizer.chat_template)",
        )
    responses = _filled(chosen.ids[start:], rejected.ids[start:])
    return EncodedPair(chosen.ids[:start], *responses, (*chosen.media, *rejected.media))


def _preference(row: Row) -> tuple[str | list[Message], list[Message]]:
    """A prompt, and two replies to it as messages."""
    prompt, chosen, rejected = row.get("prompt"), row.get("chosen"), row.get("rejected")
    if not prompt and isinstance(chosen, list | tuple) and isinstance(rejected, list | tuple):
        if chosen[:-1] != rejected[:-1]:
            raise DataError(
                "`chosen` and `rejected` differ before their last message",
                fix="give two responses to the same conversation",
            )
        prompt, chosen, rejected = list(chosen[:-1]), chosen[-1:], rejected[-1:]
    if not isinstance(prompt, str | Sequence) or not prompt or chosen is None or rejected is None:
        raise DataError(
            f"a row lacks `prompt`, `chosen` or `rejected` (columns: {', '.join(map(str, row))})",
            fix=foreign_words("column", row) or "map your columns to these names in `data:`",
        )
    replies = [_reply(name, value) for name, value in (("chosen", chosen), ("rejected", rejected))]
    return prompt if isinstance(prompt, str) else list(prompt), replies


def _reply(name: str, value: Any) -> Message:
    if isinstance(value, list | tuple) and len(value) == 1:
        value = value[0]
    if isinstance(value, Mapping) and value.get("role") == "assistant":
        return value
    if isinstance(value, list | tuple | Mapping):
        raise DataError(
            f"`{name}` is a {type(value).__name__}, neither the text of a response nor one message of the assistant",
            fix="give the conversation as `prompt` and the last message as the response",
        )
    return {"role": "assistant", "content": str(value)}


def _text_reply(reply: Message) -> str:
    if set(reply) > {"role", "content"}:
        raise DataError(
            f"a response has {', '.join(sorted(set(reply) - {'role', 'content'}))}, and its prompt is plain text",
            fix="give the prompt as messages",
        )
    return text_of(reply)


def _filled(chosen: list[int], rejected: list[int]) -> tuple[list[int], list[int]]:
    if not chosen or not rejected:
        raise DataError(
            "a response is empty and the tokenizer has no end-of-sequence token to stand for it",
            fix="remove the row, or set the tokenizer's eos_token",
        )
    return chosen, rejected


def encode_row(row: Row, tokenizer: Tokenizer, *, only_last_turn: bool = False) -> EncodedRow:
    """A demonstration as tokens, with a mask of what is to be learnt from it.

    ``messages`` (chat), ``prompt`` as messages with ``response``, or both as plain text. Learnt are the assistant's
    words including the token that ends them. ``completion`` is what TRL calls a response: text, or messages, of which
    alone is learnt then. The template is shown the row's ``tools``.

    Raises:
        DataError: the row has neither shape, or holds what would be lost.
    """
    row = with_media(row, tokenizer.family)
    prompt, response = row.get("prompt"), row.get("response", row.get("completion"))
    if response is not None and isinstance(prompt, str) and not isinstance(response, list | tuple):
        ids, target = encode_response(prompt, str(response), tokenizer)
        return EncodedRow(ids + target, [False] * len(ids) + [True] * len(target))
    first = 0
    if isinstance(response, list | tuple):
        messages, first = _two_parts(row, prompt, response)
    elif response is not None and isinstance(prompt, Sequence):
        messages = [*prompt, {"role": "assistant", "content": str(response)}]
    elif row.get("messages") and isinstance(row["messages"], Sequence):
        messages = list(row["messages"])
    else:
        raise DataError(
            f"a row has neither `messages` nor `prompt` with `response` or `completion` (columns: {_names(row)})",
            fix=foreign_words("column", row) or "map your columns to these names in `data:`",
        )
    last = max((number for number, one in enumerate(messages) if _is_said(one)), default=-1)
    if last < first:
        what = "a completion" if first else "a conversation"
        raise DataError(f"{what} has no assistant turn to learn from", fix="add an assistant message to it")
    spoken = tokenizer.chat.encode(messages[: last + 1], tools_of(row))
    first = last if only_last_turn else first
    return EncodedRow(spoken.ids, [turn is not None and turn >= first for turn in spoken.turns], spoken.media)


def _two_parts(row: Row, prompt: Any, completion: Sequence[Message]) -> tuple[list[Message], int]:
    """A conversation in two parts, and where the second begins, which is learnt."""
    if not isinstance(prompt, list | tuple) or not all(isinstance(m, Mapping) for m in (*prompt, *completion)):
        raise DataError(
            f"`completion` holds messages, but `prompt` is a {type(prompt).__name__} (columns: {_names(row)})",
            fix="give both as text or both as lists of messages",
        )
    return [*prompt, *completion], len(prompt)


def _is_said(message: Any) -> bool:
    return isinstance(message, Mapping) and message.get("role") == "assistant"


def _names(row: Row) -> str:
    return ", ".join(map(str, row))
