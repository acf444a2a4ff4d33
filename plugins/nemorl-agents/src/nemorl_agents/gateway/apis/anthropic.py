"""``POST /v1/messages`` and ``/v1/messages/count_tokens``."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from nemorl_rl.agents.contract import ToolChoice
from nemorl_rl.environments.loop_thread import in_thread

from nemorl_agents.gateway.apis.anthropic_blocks import blocks_of, history_of
from nemorl_agents.gateway.apis.base import ErrorWords, Question, Said, ask, event, new_id, pieces
from nemorl_agents.gateway.apis.formats import require_no_calls, schema_of
from nemorl_agents.gateway.apis.tools import Tool, choice_of, function_tool, named_choice, require_distinct
from nemorl_agents.gateway.body import call_options, flag_at, list_at, object_at, shown, text_at
from nemorl_agents.gateway.calls import Answer
from nemorl_agents.gateway.episodes import OpenEpisode
from nemorl_agents.gateway.errors import RequestError, TooLongError, bad_field, unsupported
from nemorl_agents.gateway.fields import Field, honoured, ignored, refused

TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
}
CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class AnthropicErrors:
    """Errors as Anthropic words them."""

    def body(self, error: RequestError, request_id: str) -> Mapping[str, Any]:
        message = error.text
        if isinstance(error, TooLongError):
            message = f"prompt is too long: {error.prompt_tokens} tokens > {error.limit} maximum"
        kind = TYPES.get(error.status, "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id}

    def event(self, error: RequestError, request_id: str) -> bytes:
        return event(self.body(error, request_id), "error")


PROMPT: Mapping[str, Field] = {
    "model": honoured("one of the served names; echoed"),
    "messages": honoured(
        "blocks of text, tool_use, tool_result and thinking, of users and tools also images; the last message is not "
        "the assistant's"
    ),
    "system": honoured("a text, or blocks of text"),
    "tools": honoured("those with an `input_schema`, which the agent runs"),
    "tool_choice": honoured("`any` and a named tool are served as `auto`, and violations are counted"),
    "thinking": ignored("the policy reasons as it was trained to; its reasoning is given as a thinking block"),
    "output_config": honoured(
        "`effort` is ignored; a `format` is served where the backend can (vLLM), and without tools"
    ),
    "cache_control": ignored("an episode's calls share their prefixes anyway"),
    "speed": ignored("there is one"),
}


class Messages:
    """Anthropic's messages."""

    path: ClassVar[str] = "/v1/messages"
    errors: ClassVar[ErrorWords] = AnthropicErrors()
    fields: ClassVar[Mapping[str, Field]] = {
        **PROMPT,
        "max_tokens": honoured("required; bounded by the run's own limit and the room in the context"),
        "stop_sequences": honoured("up to 16 strings; they are not part of the answer"),
        "temperature": honoured("0 to 2, in serving and evaluation; in training it is the run's"),
        "top_p": honoured("as `temperature`"),
        "top_k": honoured("as `temperature`; 0 and -1 keep all tokens", 0, -1),
        "stream": honoured("cut from the finished answer"),
        "output_format": honoured("as `output_config.format`"),
        "mcp_servers": refused("call them in the agent", []),
        "container": refused("run tools in the agent"),
        "context_management": refused("shorten the history in the agent"),
        "metadata": ignored("the key says who asks"),
        "service_tier": ignored("there is one"),
        "inference_geo": ignored("the answer is made where the run is"),
        "diagnostics": ignored("there are none"),
    }

    async def answer(self, body: Mapping[str, Any], episode: OpenEpisode) -> Answer:
        if "max_tokens" not in body:
            raise bad_field("max_tokens", "Field required", code="missing")
        question = question_of(body)
        place, asked = _format(body)
        schema = schema_of(asked, place)
        require_no_calls(schema, question.tools, question.tool_choice, place)
        options = call_options(body, limits=("max_tokens",), stop="stop_sequences", json_schema=schema)
        said = await ask(episode, replace(question, format_field=place), options)
        message = _message(body["model"], said)
        episode.answers.add(message["id"], [said.reply.completion])
        return Answer(message, lambda: _events(message))


class CountTokens:
    """The length of a prompt, without an answer."""

    path: ClassVar[str] = "/v1/messages/count_tokens"
    errors: ClassVar[ErrorWords] = AnthropicErrors()
    fields: ClassVar[Mapping[str, Field]] = PROMPT

    async def answer(self, body: Mapping[str, Any], episode: OpenEpisode) -> Answer:
        question = question_of(body)
        limit = episode.policy.limits.max_sequence_tokens
        async with episode.counting:
            tokens = await in_thread(episode.text.count, question.messages, question.tools, limit)
        return Answer({"input_tokens": tokens})


def _format(body: Mapping[str, Any]) -> tuple[str, Any]:
    """The format that is asked for, after its place in the body: it has two."""
    if "output_format" in body:
        return "output_format", body["output_format"]
    return "output_config.format", object_at(body.get("output_config", {}), "output_config").get("format")


def question_of(body: Mapping[str, Any]) -> Question:
    tools = _tools(body.get("tools", []))
    choice, one_call = _choice(object_at(body.get("tool_choice", {"type": "auto"}), "tool_choice"), tools)
    return Question(history_of(body), tools, choice, one_call)


def _tools(value: Any) -> tuple[Tool, ...]:
    found = []
    for number, one in enumerate(list_at(value, "tools")):
        tool = object_at(one, f"tools[{number}]")
        if tool.get("type", "custom") != "custom":
            what = f"{shown(tool['type'])} is not served"
            raise unsupported(f"tools[{number}].type", what, fix="the agent runs its tools: give an input_schema")
        if "input_schema" not in tool:
            raise bad_field(f"tools[{number}].input_schema", "Field required", code="missing")
        found.append(function_tool(tool, f"tools[{number}]", schema="input_schema"))
    return require_distinct(found, "tools")


def _choice(choice: Mapping[str, Any], tools: Sequence[Tool]) -> tuple[ToolChoice, bool]:
    kind = text_at(choice.get("type"), "tool_choice.type")
    one_call = flag_at(choice.get("disable_parallel_tool_use", False), "tool_choice.disable_parallel_tool_use")
    if kind == "tool":
        return named_choice(choice.get("name"), tools, "tool_choice.name"), one_call
    if kind not in CHOICES:
        fix = f"use {', '.join(CHOICES)} or tool"
        raise bad_field("tool_choice.type", f"{shown(kind)} is no choice", fix=fix)
    return choice_of(CHOICES[kind], tools, "tool_choice"), one_call


def _message(model: str, said: Said) -> dict[str, Any]:
    reasons = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
    is_stopped = said.stopped_by is not None and said.finish_reason == "stop"
    return {
        "id": new_id("msg_"),
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": blocks_of(said),
        "stop_reason": "stop_sequence" if is_stopped else reasons[said.finish_reason],
        "stop_sequence": said.stopped_by if is_stopped else None,
        "usage": {"input_tokens": said.reply.prompt_tokens, "output_tokens": said.output_tokens},
    }


def _events(message: Mapping[str, Any]) -> Iterator[bytes]:
    def told(name: str, **facts: Any) -> bytes:
        return event({"type": name, **facts}, name)

    usage = {**message["usage"], "output_tokens": 0}
    begun = {**message, "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
    yield told("message_start", message=begun)
    for index, block in enumerate(message["content"]):
        empty, deltas = _deltas(block)
        yield told("content_block_start", index=index, content_block=empty)
        for delta in deltas:
            yield told("content_block_delta", index=index, delta=delta)
        yield told("content_block_stop", index=index)
    ending = {name: message[name] for name in ("stop_reason", "stop_sequence")}
    yield told("message_delta", delta=ending, usage=message["usage"])
    yield told("message_stop")


def _deltas(block: Mapping[str, Any]) -> tuple[Mapping[str, Any], list[Mapping[str, Any]]]:
    """How a block begins, and what is added to it."""
    if block["type"] == "tool_use":
        arguments = json.dumps(block["input"], ensure_ascii=False)
        return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": one} for one in pieces(arguments)]
    name = "text" if block["type"] == "text" else "thinking"
    deltas: list[Mapping[str, Any]] = [{"type": f"{name}_delta", name: piece} for piece in pieces(block[name])]
    if name == "text":
        return {**block, "text": ""}, deltas
    signed = {"type": "signature_delta", "signature": block["signature"]}
    return {**block, "thinking": "", "signature": ""}, [*deltas, signed]
