"""Content blocks of Anthropic's messages to chat messages, and an answer to blocks."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from nemorl_rl.agents.contract import ChatMessage

from nemorl_agents.gateway.apis.base import Said, messages_at
from nemorl_agents.gateway.apis.contents import Part, content_of, joined, part_of, plain_text
from nemorl_agents.gateway.body import list_at, object_at, shown, text_at
from nemorl_agents.gateway.errors import RequestError, bad_field, unsupported

ROLES = ("user", "assistant", "system")
UNSIGNED = "unsigned"
"""The signature of thinking: clients send it back, and nothing depends on it."""


def history_of(body: Mapping[str, Any]) -> tuple[ChatMessage, ...]:
    """``system`` and ``messages`` as chat messages.

    Raises:
        RequestError: There are blocks that cannot be served, or the assistant's answer is begun already.
    """
    found: list[ChatMessage] = []
    if "system" in body:
        found.append({"role": "system", "content": plain_text(body["system"], "system")})
    listed = messages_at(body.get("messages"), "messages")
    for number, value in enumerate(listed):
        found += _messages(object_at(value, f"messages[{number}]"), f"messages[{number}]")
    if found[-1]["role"] == "assistant":
        raise RequestError(
            400,
            "an answer cannot be begun by the client: the last message is the assistant's",
            fix="end with a message of the user",
            code="unsupported_parameter",
            param=f"messages[{len(listed) - 1}]",
        )
    return tuple(found)


def _messages(message: Mapping[str, Any], place: str) -> Iterator[ChatMessage]:
    """One message may be several: each result of a tool is one of its own."""
    role = text_at(message.get("role"), f"{place}.role")
    if role not in ROLES:
        raise bad_field(f"{place}.role", f"{shown(role)} is no role", fix=f"roles are {', '.join(ROLES)}")
    content = message.get("content")
    if isinstance(content, str):
        yield {"role": role, "content": content}
        return
    blocks = [
        (object_at(block, f"{place}.content[{i}]"), f"{place}.content[{i}]")
        for i, block in enumerate(list_at(content, f"{place}.content"))
    ]
    yield from [_of_assistant(blocks)] if role == "assistant" else _of_others(role, blocks)


def _of_assistant(blocks: list[tuple[Mapping[str, Any], str]]) -> ChatMessage:
    texts, thoughts, calls = [], [], []
    for block, place in blocks:
        kind = block.get("type")
        if kind == "text":
            texts.append(text_at(block.get("text"), f"{place}.text"))
        elif kind == "thinking":
            thoughts.append(text_at(block.get("thinking"), f"{place}.thinking"))
        elif kind == "tool_use":
            function = {
                "name": text_at(block.get("name"), f"{place}.name"),
                "arguments": json.dumps(object_at(block.get("input"), f"{place}.input"), ensure_ascii=False),
            }
            calls.append({"id": text_at(block.get("id"), f"{place}.id"), "type": "function", "function": function})
        else:
            raise _not_served(kind, place, "text, thinking and tool_use")
    optional = {"reasoning_content": "\n".join(thoughts), "tool_calls": calls}
    return {
        "role": "assistant",
        "content": "\n".join(texts) if texts or not calls else None,
        **{name: value for name, value in optional.items() if value},
    }


def _of_others(role: str, blocks: list[tuple[Mapping[str, Any], str]]) -> Iterator[ChatMessage]:
    parts: list[Part] = []
    for block, place in blocks:
        if block.get("type") == "tool_result" and role == "user":
            if parts:
                yield {"role": role, "content": joined(parts)}
                parts = []
            yield {
                "role": "tool",
                "content": content_of(block.get("content") or "", f"{place}.content"),
                "tool_call_id": text_at(block.get("tool_use_id"), f"{place}.tool_use_id"),
            }
            continue
        part = part_of(block, place)
        if part is None or (part["type"] != "text" and role != "user"):
            raise _not_served(block.get("type"), place, "text, image and tool_result" if role == "user" else "text")
        parts.append(part)
    if parts or not blocks:
        yield {"role": role, "content": joined(parts)}


def _not_served(kind: Any, place: str, served: str) -> RequestError:
    return unsupported(f"{place}.type", f"{shown(kind)} is not served here", fix=f"blocks are {served}")


def blocks_of(said: Said) -> list[dict[str, Any]]:
    """An answer as blocks: thinking, text and calls, as far as there are any."""
    blocks: list[dict[str, Any]] = []
    if said.reasoning:
        blocks.append({"type": "thinking", "thinking": said.reasoning, "signature": UNSIGNED})
    if said.content:
        blocks.append({"type": "text", "text": said.content})
    for call in said.tool_calls:
        function = call["function"]
        blocks.append(
            {"type": "tool_use", "id": call["id"], "name": function["name"], "input": _input(function["arguments"])}
        )
    return blocks


def _input(arguments: str) -> Mapping[str, Any]:
    """Arguments as an object, which this API insists on. Others are kept as text, under ``arguments``."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"arguments": arguments}
