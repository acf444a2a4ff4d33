"""Messages as clients send them, brought to one form, and keys by which two forms of one message are the same."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nemorl.errors import DataError

from nemorl_rl.agents.contract import ChatMessage
from nemorl_rl.chat.codec import Tools
from nemorl_rl.chat.media import PARTS, part_of
from nemorl_rl.data.tokenizer import encodable

if TYPE_CHECKING:
    from nemorl_media.family import Family

TEXT_PARTS = ("text", "input_text", "output_text", "refusal")
"""Types of content parts that hold text."""
ROLES = ("system", "developer", "user", "assistant", "tool")


def plain_messages(messages: Iterable[ChatMessage], family: Family | None = None) -> tuple[dict[str, Any], ...]:
    """Messages in one form: content as text, no empty fields, calls of one answer in one message, and results of tools
    with the tool's name, which some templates write and most clients leave out. Content with images or sounds is a list
    of parts (``chat.media``), where the model is of a ``family`` that sees or hears.

    Raises:
        DataError: A message is none, or holds something else than text.

    Example:
        >>> plain_messages([{"role": "user", "content": [{"type": "text", "text": "2 + 2?"}], "name": None}])
        ({'role': 'user', 'content': '2 + 2?'},)
    """
    found: list[dict[str, Any]] = []
    called: dict[str, str] = {}
    for number, message in enumerate(messages):
        plain = _plain(message, number, family)
        called.update((call["id"], call["function"]["name"]) for call in plain.get("tool_calls", ()))
        if plain["role"] == "tool" and plain.get("tool_call_id") in called:
            plain = {"name": called[plain["tool_call_id"]], **plain}
        if found and _goes_on(found[-1], plain):
            found[-1] = _joined(found[-1], plain)
        else:
            found.append(plain)
    return tuple(found)


def require_tools(tools: Tools) -> None:
    """
    Raises:
        DataError: One of them is no function with a name.
    """
    for number, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise DataError(
                f"tool {number} is no function with a name",
                fix='write tools as {"type": "function", "function": {"name": …, "parameters": …}}',
            )


def message_key(message: ChatMessage) -> str:
    """Equal for the forms in which clients send the same message: reasoning and the spelling of JSON do not matter."""
    role, content = str(message["role"]), str(message["content"])  # of an image or a sound it tells the digest
    if role == "assistant":
        content = content.strip()
    parts = [role, content, str(message.get("tool_call_id", "")), *map(_call_key, message.get("tool_calls", ()))]
    return _digest(parts)


def calls_key(message: ChatMessage) -> str:
    """Equal for the same calls, whatever their ids and the spelling of their arguments."""
    return _digest(map(_call_key, message.get("tool_calls", ())))


def tools_key(tools: Tools) -> str:
    """Equal for the same tools in the same order."""
    return _digest([json.dumps(list(tools), sort_keys=True, default=str)])


def prefix_keys(keys: Sequence[str], before: str = "") -> list[str]:
    """Of each prefix of a history, given the keys of its messages: the i-th covers i messages.

    Args:
        keys: Of messages.
        before: Of what was before them.
    """
    found = [before]
    for key in keys:
        found.append(_digest([found[-1], key]))
    return found


def call_ids(message: ChatMessage) -> tuple[str, ...]:
    return tuple(str(call["id"]) for call in message.get("tool_calls", ()))


def _plain(message: ChatMessage, number: int, family: Family | None) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise DataError(f"message {number} is a {type(message).__name__}", fix='write it as {"role": …, "content": …}')
    role = message.get("role")
    if role not in ROLES:
        raise DataError(f"message {number} has the role {role!r}", fix=f"use one of {', '.join(ROLES)}")
    plain: dict[str, Any] = {"role": role, "content": _content(message.get("content"), number, family)}
    for name in ("name", "tool_call_id", "reasoning_content"):
        if message.get(name):
            plain[name] = str(message[name])
    if "reasoning_content" not in plain and isinstance(message.get("reasoning"), str) and message["reasoning"]:
        plain["reasoning_content"] = message["reasoning"]
    if message.get("tool_calls"):
        if not isinstance(message["tool_calls"], Sequence):
            raise DataError(f"the tool calls of message {number} are no list", fix="write them as a list")
        plain["tool_calls"] = [_plain_call(call, number) for call in message["tool_calls"]]
    return plain


def _content(content: Any, number: int, family: Family | None) -> str | list[dict[str, Any]]:
    parts = content if isinstance(content, list | tuple) else ()
    if not any(isinstance(part, Mapping) and part.get("type") in PARTS for part in parts):
        return _text(content, number)
    return [
        part_of(part, family, number)
        if isinstance(part, Mapping) and part.get("type") in PARTS
        else {"type": "text", "text": _text([part], number)}
        for part in parts
    ]


def _text(content: Any, number: int) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return encodable(content)
    if not isinstance(content, Sequence):
        raise DataError(f"the content of message {number} is {content!r:.80}", fix="give text, or a list of text parts")
    texts = []
    for part in content:
        kind = part.get("type", "text") if isinstance(part, Mapping) else "text"
        if kind not in TEXT_PARTS:
            raise DataError(
                f"message {number} holds content of type {kind!r}",
                fix=f"send one of {', '.join((*TEXT_PARTS, *PARTS))}",
            )
        texts.append(str(part.get("text", part.get("refusal", ""))) if isinstance(part, Mapping) else str(part))
    return encodable("\n".join(texts))


def _plain_call(call: Any, number: int) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise DataError(
            f"a tool call of message {number} has no function name",
            fix='write calls as {"id": …, "type": "function", "function": {"name": …, "arguments": …}}',
        )
    arguments = function.get("arguments")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)
    return {
        "id": str(call.get("id", "")),
        "type": "function",
        "function": {"name": function["name"], "arguments": text},
    }


def _goes_on(before: ChatMessage, message: ChatMessage) -> bool:
    """An answer that came apart: the Responses API lists its text and each of its calls as items of their own."""
    return (
        before["role"] == message["role"] == "assistant" and bool(message.get("tool_calls")) and not message["content"]
    )


def _joined(before: ChatMessage, message: ChatMessage) -> dict[str, Any]:
    calls = [*before.get("tool_calls", ()), *message["tool_calls"]]
    return {**message, **before, "tool_calls": calls}


def _call_key(call: Mapping[str, Any]) -> str:
    function = call["function"]
    try:
        arguments = json.dumps(json.loads(function["arguments"] or "{}"), sort_keys=True)
    except (ValueError, RecursionError):
        arguments = function["arguments"]
    return f"{function['name']}\x1f{arguments}"


def _digest(parts: Iterable[str]) -> str:
    return hashlib.blake2b(json.dumps(list(parts)).encode(), digest_size=16).hexdigest()
