"""Bodies that nobody means: any value in any place is an answer or the API's error, never a failure of the gateway."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from typing import Any

import pytest
from scripted_policy import calling

CALL = calling("add", '{"a": 1}')
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": ["integer", "null"], "enum": [1, None]}, "b": {"type": "array", "items": {}}},
    "required": ["a"],
    "additionalProperties": False,
    "anyOf": [{"$defs": {"x": True}}],
}
FUNCTION = {"name": "add", "description": "Adds.", "parameters": SCHEMA}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "model": "policy",
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "user", "content": [{"type": "text", "text": "t"}], "name": "me"},
            {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "r"},
            {"role": "tool", "tool_call_id": "call_1", "content": "3"},
        ],
        "tools": [{"type": "function", "function": FUNCTION}],
        "tool_choice": {"type": "function", "function": {"name": "add"}},
        "stream_options": {"include_usage": True},
        "stop": ["x"],
        "n": 2,
        "logprobs": True,
        "response_format": {"type": "text"},
    },
    "/v1/responses": {
        "model": "policy",
        "instructions": "i",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "t"}]},
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "r"}]},
            {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "3"},
        ],
        "tools": [{"type": "function", **FUNCTION}],
        "tool_choice": {"type": "function", "name": "add"},
        "text": {"format": {"type": "text"}},
        "include": ["reasoning.encrypted_content"],
        "max_output_tokens": 5,
    },
    "/v1/messages": {
        "model": "policy",
        "max_tokens": 5,
        "system": [{"type": "text", "text": "s"}],
        "messages": [
            {"role": "user", "content": "q"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "r", "signature": "s"},
                    {"type": "text", "text": "t"},
                    {"type": "tool_use", "id": "call_1", "name": "add", "input": {"a": 1}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "call_1", "content": [{"type": "text", "text": "3"}]},
                    {"type": "text", "text": "t"},
                ],
            },
        ],
        "tools": [{"name": "add", "input_schema": SCHEMA}],
        "tool_choice": {"type": "tool", "name": "add", "disable_parallel_tool_use": True},
        "stop_sequences": ["x"],
        "output_config": {"effort": "low"},
    },
    "/v1/completions": {"model": "policy", "prompt": ["a", "b"], "max_tokens": 3, "stop": "x", "logprobs": 0, "n": 2},
}
ODD = (
    None,
    True,
    0,
    -1,
    1e308,
    2**70,
    "",
    "auto",
    "function",
    "\x00",
    [],
    [None],
    [[]],
    {},
    {"type": None},
    {"": [{}]},
)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to each value within a value."""
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in parts:
        yield (*path, key)
        yield from places(part, (*path, key))


def changed(body: Any, path: tuple[Any, ...], odd: Any) -> Any:
    copied = copy.deepcopy(body)
    inner = copied
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = odd
    return copied


@pytest.mark.parametrize("number", [f"1{'0' * 400}", f"-1{'0' * 400}", "1e400"], ids=["large", "low", "infinite"])
@pytest.mark.parametrize("field", ["temperature", "top_p", "max_tokens", "seed"])
def test_a_number_beyond_all_floats_is_the_clients_mistake(talk: Any, field: str, number: str) -> None:
    body = f'{{"model": "policy", "messages": [{{"role": "user", "content": "q"}}], "{field}": {number}}}'
    answer = talk.post("/v1/chat/completions", raw=body.encode())
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)
    reward = talk.post("/v1/reward", raw=f'{{"reward": {number}}}'.encode())
    assert (reward.status_code, reward.json()["error"]["param"]) == (400, "reward")
    assert talk.episode.traffic.failures == 0


@pytest.mark.parametrize("path", BODIES)
def test_no_value_in_any_place_makes_the_gateway_fail(talk: Any, path: str) -> None:
    body = BODIES[path]
    assert talk.post(path, body).status_code == 200
    chance = random.Random(path)
    for place in places(body):
        for odd in chance.sample(ODD, 4):
            answer = talk.post(path, changed(body, place, odd))
            assert answer.status_code in (200, 400, 404), (place, odd, answer.text)
    assert talk.episode.traffic.failures == 0
