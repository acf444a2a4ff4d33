"""A finished response as the events of a stream."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import count
from typing import Any

from nemorl_agents.gateway.apis.base import event, pieces

Told = Iterator[tuple[str, dict[str, Any]]]
"""Names of events, without ``response.``, and what they hold."""


def events_of(response: Mapping[str, Any]) -> Iterator[bytes]:
    """All events of a response, numbered."""
    numbers = count()
    for name, facts in _told(response):
        kind = f"response.{name}"
        yield event({"type": kind, **facts, "sequence_number": next(numbers)}, kind)


def _told(response: Mapping[str, Any]) -> Told:
    begun = {**response, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    yield "created", {"response": begun}
    yield "in_progress", {"response": begun}
    for index, item in enumerate(response["output"]):
        place = {"output_index": index}
        yield "output_item.added", {**place, "item": {**item, **_empty(item), "status": "in_progress"}}
        yield from _of_item(item, {**place, "item_id": item["id"]})
        yield "output_item.done", {**place, "item": item}
    yield str(response["status"]), {"response": response}


def _empty(item: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"arguments": ""} if item["type"] == "function_call" else {"content": []}


def _of_item(item: Mapping[str, Any], place: Mapping[str, Any]) -> Told:
    if item["type"] == "function_call":
        for piece in pieces(item["arguments"]):
            yield "function_call_arguments.delta", {**place, "delta": piece}
        yield "function_call_arguments.done", {**place, "name": item["name"], "arguments": item["arguments"]}
        return
    [part] = item["content"]
    place, text = {**place, "content_index": 0}, part["text"]
    extra: Mapping[str, Any] = {"logprobs": []} if part["type"] == "output_text" else {}
    yield "content_part.added", {**place, "part": {**part, "text": ""}}
    for piece in pieces(text):
        yield f"{part['type']}.delta", {**place, "delta": piece, **extra}
    yield f"{part['type']}.done", {**place, "text": text, **extra}
    yield "content_part.done", {**place, "part": part}
