"""Privileged prompts: a task told with more than the student reads. Importing this imports no torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from nemorl.errors import DataError
from nemorl.types import Prompt, Row
from nemorl_rl.chat.media import PARTS
from nemorl_rl.chat.rows import text_of
from nemorl_rl.data.tokenizer import Tokenizer
from nemorl_rl.rollouts.prompts import to_prompt

_PLACEHOLDER = re.compile(r"\{(\w+)\}")


def placeholders(template: str) -> list[str]:
    """Names in braces, in order.

    Example:
        >>> placeholders("{prompt} Hint: {solution}")
        ['prompt', 'solution']
    """
    return _PLACEHOLDER.findall(template)


def filled(template: str, values: Mapping[str, str]) -> str:
    """The template with its placeholders replaced; braces within the values stay as they are.

    Example:
        >>> filled("{prompt} Hint: {solution}", {"prompt": "f{x}?", "solution": "{prompt}"})
        'f{x}? Hint: {prompt}'
    """
    return _PLACEHOLDER.sub(lambda found: values[found[1]], template)


def given_text(row: Row, column: str) -> str:
    """The text in a column; where the row has none there, the last message of ``messages`` if the assistant says it.

    Raises:
        DataError: there is no text in either.

    Example:
        >>> given_text({"prompt": "1+1=", "response": "2"}, "response")
        '2'
    """
    value = row.get(column)
    if value is None and row.get("messages") and row["messages"][-1].get("role") == "assistant":
        value = row["messages"][-1]
    if isinstance(value, list | tuple) and len(value) == 1:
        value = value[0]
    text = text_of(value) if isinstance(value, Mapping) else "" if isinstance(value, list | tuple) else value
    if text is None or not str(text).strip():
        raise DataError(
            f"a row has no text in `{column}`, which the teacher is to read (columns: {', '.join(map(str, row))})",
            fix="set context_column to the column that has it, or map yours to this name in `data:`",
        )
    return str(text)


def privileged_prompt(prompt: Prompt, template: str, values: Mapping[str, str], tokenizer: Tokenizer) -> list[int]:
    """The tokens of a task told with more: the template in place of its text, or of that of its last user message.

    Images and sounds stay where they are.

    Args:
        prompt: What the student reads.
        template: With ``{prompt}`` for that text, and a placeholder for each of ``values``.
        values: Texts by placeholder.
        tokenizer: Of the policy; messages go through its chat template, with the row's tools.
    """
    text = filled(template, {"prompt": prompt.text, **values})
    if not prompt.messages:
        return list(to_prompt({"prompt": text}, prompt.index, tokenizer).token_ids)
    given = prompt.row.get("prompt") or prompt.row.get("messages")
    messages = list(given[: len(prompt.messages)] if prompt.media and given else prompt.messages)
    users = [number for number, message in enumerate(messages) if message["role"] == "user"]
    place = users[-1] if users else len(messages) - 1
    messages[place] = {**messages[place], "content": _with_text(messages[place]["content"], text)}
    return list(to_prompt({**prompt.row, "prompt": messages}, prompt.index, tokenizer).token_ids)


def _with_text(content: Any, text: str) -> str | list[Any]:
    """A message's content with other text in the place of its first, and its images and sounds.

    Example:
        >>> _with_text([{"type": "image"}, {"type": "text", "text": "how many?"}], "2")
        [{'type': 'image'}, {'type': 'text', 'text': '2'}]
    """
    if not isinstance(content, list | tuple):
        return text
    is_item = [isinstance(part, Mapping) and part.get("type") in PARTS for part in content]
    place = is_item.index(False) if False in is_item else len(content)
    after = [part for part, stays in zip(content[place:], is_item[place:], strict=True) if stays]
    return [*content[:place], {"type": "text", "text": text}, *after]
