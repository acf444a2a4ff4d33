"""Formats of an answer: each API's own way to ask for JSON becomes the schema that sampling is held to."""

from __future__ import annotations

import json
from typing import Any

import pytest
from nemorl_rl.agents.contract import REMEDY, ConstraintError
from scripted_policy import Asked, ScriptedPolicy

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "?"}]}
NAMED = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
FLAT = {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": False}
FUNCTION = {"name": "add", "parameters": {"type": "object"}}
WAYS = [
    pytest.param("/v1/chat/completions", {**CHAT, "response_format": NAMED}, "response_format", id="chat"),
    pytest.param("/v1/responses", {"input": "?", "text": {"format": FLAT}}, "text.format", id="responses"),
    pytest.param(
        "/v1/messages",
        {**CHAT, "max_tokens": 5, "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
        "output_config.format",
        id="messages",
    ),
    pytest.param(
        "/v1/messages",
        {**CHAT, "max_tokens": 5, "output_format": {"type": "json_schema", "schema": SCHEMA}},
        "output_format",
        id="messages, earlier",
    ),
]
TOOLS = {
    "/v1/chat/completions": {"tools": [{"type": "function", "function": FUNCTION}]},
    "/v1/responses": {"tools": [{"type": "function", **FUNCTION}]},
    "/v1/messages": {"tools": [{"name": "add", "input_schema": {"type": "object"}}]},
}


def post(talk: Any, path: str, body: dict[str, Any]) -> Any:
    return talk.post(path, {"model": "policy", **body})


def message_of(answer: Any) -> str:
    text: str = answer.json()["error"]["message"]
    return text


@pytest.mark.parametrize(("path", "body", "field"), WAYS)
def test_a_schema_reaches_the_policy(talk: Any, path: str, body: dict[str, Any], field: str) -> None:
    assert post(talk, path, body).status_code == 200
    assert json.loads(talk.policy.asked[0].options.json_schema) == SCHEMA


@pytest.mark.parametrize(("path", "body", "field"), WAYS)
def test_an_engine_that_cannot_is_told_by_the_fields_name_and_is_no_failure(
    open_talk: Any, path: str, body: dict[str, Any], field: str
) -> None:
    def refuse(asked: Asked) -> Any:
        raise ConstraintError("this generation backend cannot constrain what is sampled", fix=REMEDY)

    talk = open_talk(ScriptedPolicy(refuse))
    answer = post(talk, path, body)
    assert answer.status_code == 400
    assert message_of(answer) == f"{field}: this generation backend cannot constrain what is sampled: {REMEDY}"
    assert (talk.episode.traffic.failures, talk.episode.traffic.refused) == (0, 1)


@pytest.mark.parametrize(("path", "body", "field"), WAYS)
def test_a_format_and_tools_exclude_each_other(talk: Any, path: str, body: dict[str, Any], field: str) -> None:
    answer = post(talk, path, {**body, **TOOLS[path]})
    assert answer.status_code == 400
    assert message_of(answer).startswith(f"{field}: cannot be served together with tools")
    none = {"type": "none"} if path == "/v1/messages" else "none"
    assert post(talk, path, {**body, **TOOLS[path], "tool_choice": none}).status_code == 200


def test_any_object_and_any_text(talk: Any) -> None:
    for form in ({"type": "json_object"}, {"type": "text"}, {}, None):
        assert post(talk, "/v1/chat/completions", {**CHAT, "response_format": form}).status_code == 200
        assert post(talk, "/v1/responses", {"input": "?", "text": {"format": form}}).status_code == 200
    asked = [one.options.json_schema for one in talk.policy.asked]
    assert asked == ['{"type": "object"}'] * 2 + [None] * 6


@pytest.mark.parametrize(
    ("form", "says"),
    [
        ({"type": "grammar"}, 'response_format.type: "grammar" cannot be served'),
        ({"type": "json_schema"}, "response_format.json_schema: must be an object"),
        ({"type": "json_schema", "json_schema": {"name": "x"}}, "response_format.json_schema.schema: is missing"),
        ({"type": "json_schema", "json_schema": {"schema": {"type": "array"}}}, 'schema.type: is "array"'),
        ({"type": "json_schema", "json_schema": {"schema": {"properties": {"a": 1}}}}, "schema.properties.a: must be"),
        ("json", "response_format: must be an object"),
    ],
)
def test_what_is_no_format_is_refused_by_place(talk: Any, form: Any, says: str) -> None:
    answer = post(talk, "/v1/chat/completions", {**CHAT, "response_format": form})
    assert answer.status_code == 400
    assert says in message_of(answer)
    assert talk.policy.asked == []
