"""Items of ``/v1/responses`` to chat messages, and an answer to items."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nemorl_rl.agents.contract import ChatMessage

from nemorl_agents.gateway.apis.base import Said, messages_at, new_id
from nemorl_agents.gateway.apis.chat import ROLES
from nemorl_agents.gateway.apis.contents import content_of, plain_text
from nemorl_agents.gateway.body import list_at, object_at, shown, text_at
from nemorl_agents.gateway.errors import bad_field, unsupported


class History:
    """Messages, put together from items: reasoning, text and calls of one turn are one message."""

    def __init__(self) -> None:
        self._messages: list[dict[str, Any]] = []

    @property
    def messages(self) -> tuple[ChatMessage, ...]:
        return tuple(self._messages)

    def add(self, value: Any, place: str) -> None:
        """The next item.

        Raises:
            RequestError: It is none that can be served.
        """
        item = object_at(value, place)
        kind = item.get("type", "message")
        if kind == "message":
            self._add_message(item, place)
        elif kind == "reasoning":
            self._turn(has=("content", "tool_calls", "reasoning_content"))["reasoning_content"] = _reasoning(
                item, place
            )
        elif kind == "function_call":
            self._turn(has=()).setdefault("tool_calls", []).append(_call(item, place))
        elif kind == "function_call_output":
            content = content_of(item.get("output"), f"{place}.output")
            self._messages.append(
                {"role": "tool", "content": content, "tool_call_id": text_at(item.get("call_id"), f"{place}.call_id")}
            )
        else:
            fix = "send messages, reasoning, function calls and their outputs"
            raise unsupported(f"{place}.type", f"{shown(kind)} is not served", fix=fix)

    def _add_message(self, item: Mapping[str, Any], place: str) -> None:
        role = ROLES.get(text_at(item.get("role"), f"{place}.role"))
        if role is None or role == "tool":
            roles = ", ".join(name for name in ROLES if name != "tool")
            raise bad_field(f"{place}.role", f"{shown(item['role'])} is no role", fix=f"roles are {roles}")
        read = content_of if role == "user" else plain_text
        content = read(item.get("content"), f"{place}.content")
        if role == "assistant":
            self._turn(has=("content", "tool_calls"))["content"] = content
        else:
            self._messages.append({"role": role, "content": content})

    def _turn(self, has: tuple[str, ...]) -> dict[str, Any]:
        """The assistant's turn that an item belongs to: the last message, unless it has one of these already."""
        last = self._messages[-1] if self._messages else None
        if last is None or last["role"] != "assistant" or any(last.get(name) is not None for name in has):
            last = {"role": "assistant", "content": None}
            self._messages.append(last)
        return last


def _reasoning(item: Mapping[str, Any], place: str) -> str:
    name = "content" if item.get("content") else "summary"
    parts = [object_at(part, place) for part in list_at(item.get(name) or [], f"{place}.{name}")]
    return "\n".join(text_at(part.get("text"), f"{place}.{name}[{i}].text") for i, part in enumerate(parts))


def _call(item: Mapping[str, Any], place: str) -> Mapping[str, Any]:
    names = {name: text_at(item.get(name), f"{place}.{name}") for name in ("call_id", "name", "arguments")}
    function = {"name": names["name"], "arguments": names["arguments"]}
    return {"id": names["call_id"], "type": "function", "function": function}


def history_of(value: Any) -> History:
    """``input``: a text, or items."""
    history = History()
    if isinstance(value, str):
        history.add({"role": "user", "content": value}, "input")
        return history
    for number, item in enumerate(messages_at(value, "input")):
        history.add(item, f"input[{number}]")
    return history


def items_of(said: Said) -> list[dict[str, Any]]:
    """An answer as items: reasoning, text and calls, as far as there are any."""
    status = "incomplete" if said.finish_reason == "length" else "completed"
    items: list[dict[str, Any]] = []
    if said.reasoning:
        content = [{"type": "reasoning_text", "text": said.reasoning}]
        items.append({"id": new_id("rs_"), "type": "reasoning", "summary": [], "content": content, "status": status})
    if said.content or not said.tool_calls:
        text = {"type": "output_text", "text": said.content, "annotations": [], "logprobs": []}
        items.append(
            {"id": new_id("msg_"), "type": "message", "role": "assistant", "content": [text], "status": status}
        )
    for call in said.tool_calls:
        facts = {"call_id": call["id"], **{name: call["function"][name] for name in ("name", "arguments")}}
        items.append({"id": new_id("fc_"), "type": "function_call", **facts, "status": status})
    return items
