"""Rows of a dataset as tasks to respond to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nemorl.errors import DataError
from nemorl.plugins.slots import foreign_words
from nemorl.types import Message, Prompt, Row

from nemorl_rl.chat.media import media_in, with_media
from nemorl_rl.chat.rows import text_of, tools_of, without_none
from nemorl_rl.data.tokenizer import Tokenizer


def to_prompt(row: Row, index: int, tokenizer: Tokenizer) -> Prompt:
    """A dataset row as a task. ``prompt`` is raw text or chat messages; ``messages`` may stand for the latter. The chat
    template is shown the row's ``tools``. ``prompt: []`` is a task whose environment speaks first.

    Raises:
        DataError: the row has neither, or an empty one, or holds what would be lost.
    """
    row = with_media(row, tokenizer.family)
    source = row.get("prompt") or row.get("messages")
    answer = row.get("answer")
    messages: tuple[Message, ...]
    if isinstance(source, str) and source:
        text, messages, ids = source, (), tokenizer.encode(source)
    elif row.get("prompt") == [] and not row.get("messages"):
        text, messages, ids = "", (), []
    elif isinstance(source, Sequence) and source:
        turns = _prompt_turns(source)
        ids = tokenizer.encode_prompt(turns, tools_of(row))
        messages = tuple({**without_none(turn), "content": text_of(turn)} for turn in turns)
        text = next((turn["content"] for turn in reversed(messages) if turn["role"] == "user"), messages[-1]["content"])
    else:
        raise DataError(
            f"row {index} has no prompt (columns: {', '.join(map(str, row))})",
            fix=foreign_words("column", row)
            or "give rows a `prompt` (text or messages; [] where the environment speaks first), or map your column to "
            "it in `data:`",
        )
    media = () if isinstance(source, str) or source is None else media_in(source)
    return Prompt(index, text, tuple(ids), messages, None if answer is None else str(answer), row, media)


def to_prompts(rows: Sequence[Row], tokenizer: Tokenizer) -> list[Prompt]:
    return [to_prompt(row, index, tokenizer) for index, row in enumerate(rows)]


def require_first_words(prompt: Prompt, environment: str) -> None:
    """
    Raises:
        DataError: The prompt is empty, and the environment does not call the policy itself: nobody speaks first.
    """
    if not prompt.token_ids:
        raise DataError(
            f"prompt {prompt.index} is empty, and {environment} waits for a response",
            fix="give the row a `prompt`, or an environment that calls the policy itself (`rollout`)",
        )


def required_answer(prompt: Prompt, environment: str) -> str:
    """The row's answer, which a grader cannot do without.

    Raises:
        DataError: the row has none.
    """
    if prompt.answer is None or not prompt.answer.strip():
        raise DataError(
            f"the {environment} environment has no answer to compare with for prompt {prompt.text[:80]!r}",
            fix="give the dataset an `answer` column, or name it (answer_column)",
        )
    return prompt.answer.strip()


def _prompt_turns(turns: Sequence[Any]) -> tuple[Message, ...]:
    """Chat turns up to where the assistant is to speak: a final assistant turn is the answer, not the prompt."""
    for turn in turns:
        if not isinstance(turn, Mapping) or "role" not in turn or not {"content", "tool_calls"} & set(turn):
            raise DataError(f"{turn!r:.80} is not a chat message", fix='write {"role": "user", "content": "…"}')
    kept = turns[:-1] if turns[-1]["role"] == "assistant" else turns
    if not kept:
        raise DataError("a conversation holds only the assistant's answer", fix="begin it with a user message")
    return tuple(kept)
