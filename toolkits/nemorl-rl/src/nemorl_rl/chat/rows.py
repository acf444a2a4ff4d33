"""A dataset row's conversation: what of it the chat template is given, and what is refused because it would be lost."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from nemorl.errors import DataError
from nemorl.media import Media
from nemorl.types import Row

from nemorl_rl.agents.contract import ChatMessage
from nemorl_rl.chat.codec import Tools
from nemorl_rl.chat.media import PARTS
from nemorl_rl.chat.messages import TEXT_PARTS, require_tools
from nemorl_rl.chat.template_text import REASONING_NAMES
from nemorl_rl.data.tokenizer import encodable

TOOLS_FIX = "give a list of functions, or rename the column if it holds something else"


def tools_of(row: Row) -> Tools:
    """The tools of a row: its column ``tools``, a list or the same as JSON text.

    Raises:
        DataError: They are no functions with names.

    Example:
        >>> tools_of({"prompt": "2 + 2?", "tools": "[]"})
        ()
    """
    given = row.get("tools")
    if isinstance(given, str):
        try:
            given = json.loads(given) if given.strip() else None
        except ValueError as error:
            raise DataError(f"`tools` of a row is no JSON: {error}", fix=TOOLS_FIX) from error
    if given is None:
        return ()
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise DataError(f"`tools` of a row is a {type(given).__name__}", fix=TOOLS_FIX)
    tools = tuple(without_none(tool) for tool in given)
    require_tools([{"function": tool} if _is_bare(tool) else tool for tool in tools])
    return tools


def row_messages(messages: Sequence[Any], reasoning_names: Sequence[str]) -> list[dict[str, Any]]:
    """The messages of a row with nothing lost: calls in one form, reasoning by the name that the template reads.

    Args:
        messages: As the row has them. Fields that are ``None`` are those that a table adds.
        reasoning_names: Fields that the template shows as the reasoning.

    Raises:
        DataError: One is no message, or holds something that the template would not show.
    """
    return [_message(message, number, reasoning_names) for number, message in enumerate(messages)]


def text_of(message: ChatMessage) -> str:
    """The text of a message, its parts joined by line breaks."""
    content = message.get("content")
    if not isinstance(content, list | tuple):
        return str(content or "")
    return "\n".join(
        part if isinstance(part, str) else str(part.get("text") or part.get("refusal") or "")
        for part in content
        if isinstance(part, str) or part.get("type") not in PARTS
    )


def without_none(value: Any) -> Any:
    """Without the fields that a table adds to rows which lack them."""
    if isinstance(value, Mapping):
        return {str(key): without_none(item) for key, item in value.items() if item is not None}
    return [without_none(item) for item in value] if isinstance(value, list | tuple) else value


def _is_bare(tool: Any) -> bool:
    """A function without the envelope around it, which templates show as it is."""
    return isinstance(tool, Mapping) and "function" not in tool and "name" in tool


def _message(given: Any, number: int, reasoning_names: Sequence[str]) -> dict[str, Any]:
    if not isinstance(given, Mapping) or not isinstance(given.get("role"), str):
        raise DataError(f"message {number} is {given!r:.80}", fix='write {"role": "user", "content": "…"}')
    message = {str(name): value for name, value in given.items() if value is not None and name != "tool_calls"}
    message["content"] = _content(given.get("content"), number)
    calls = given.get("tool_calls") or ()
    if not isinstance(calls, Sequence):
        raise DataError(f"`tool_calls` of message {number} is {calls!r:.80}", fix="give a list of calls")
    if calls:
        message["tool_calls"] = [_call(call, number) for call in calls]
    _name_reasoning(message, number, reasoning_names)
    return message


def _content(content: Any, number: int) -> str | list[dict[str, Any]]:
    if content is None:
        return ""
    if isinstance(content, str):
        return encodable(content)
    if not isinstance(content, Sequence):
        raise DataError(f"the content of message {number} is {content!r:.80}", fix="give text, or a list of text parts")
    parts = []
    for part in content:
        if isinstance(part, Mapping) and isinstance(part.get("media"), Media):
            parts.append(dict(part))
            continue
        kept = {"type": "text", "text": part} if isinstance(part, str) else without_none(part)
        kind = kept.get("type", "text") if isinstance(kept, Mapping) else type(part).__name__
        if kind not in TEXT_PARTS:
            raise DataError(
                f"message {number} holds content of type {kind!r}",
                fix=f"leave such rows out, or give one of {', '.join((*TEXT_PARTS, *PARTS))}",
            )
        parts.append({"type": "text", "text": encodable(str(kept.get("text", kept.get("refusal", ""))))})
    return parts


def _call(call: Any, number: int) -> dict[str, Any]:
    """A call whose arguments are JSON text, from a nested or a flat one. They are taken from JSON as templates want."""
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise DataError(
            f"a tool call of message {number} has no function name",
            fix='write calls as {"type": "function", "function": {"name": …, "arguments": …}}',
        )
    arguments = function.get("arguments")
    text = arguments if isinstance(arguments, str) else json.dumps(without_none(arguments or {}), ensure_ascii=False)
    envelope = {name: call[name] for name in ("id", "type") if "function" in call and call.get(name) is not None}
    return {"type": "function", **envelope, "function": {"name": function["name"], "arguments": text}}


def _name_reasoning(message: dict[str, Any], number: int, read: Sequence[str]) -> None:
    """Give the reasoning a name that the template reads."""
    given = {name: message.pop(name) for name in REASONING_NAMES if message.get(name)}
    if not given:
        return
    if not read:
        raise DataError(
            f"message {number} has `{next(iter(given))}`, which the model's chat template does not show",
            fix="write it into the content as the model does, e.g. <think>…</think>, or drop the field",
        )
    kept = next((name for name in read if name in given), read[0])
    message[kept] = given.get(kept, next(iter(given.values())))
