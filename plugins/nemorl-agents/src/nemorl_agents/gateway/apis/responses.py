"""``POST /v1/responses``."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from nemorl_rl.agents.contract import ChatMessage

from nemorl_agents.gateway.apis.base import ErrorWords, OpenAIErrors, Question, Said, ask, new_id
from nemorl_agents.gateway.apis.formats import require_no_calls, schema_of
from nemorl_agents.gateway.apis.response_events import events_of
from nemorl_agents.gateway.apis.response_items import history_of, items_of
from nemorl_agents.gateway.apis.tools import (
    in_itself,
    tool_choice_of,
    tools_of,
)
from nemorl_agents.gateway.body import call_options, flag_at, list_at, object_at, shown, text_at
from nemorl_agents.gateway.calls import Answer
from nemorl_agents.gateway.episodes import OpenEpisode
from nemorl_agents.gateway.errors import RequestError, unsupported
from nemorl_agents.gateway.fields import Field, honoured, ignored, refused

HARMLESS = ("reasoning.encrypted_content",)
"""Items that may be included and are not there: reasoning is given as it is."""


class Responses:
    """OpenAI's responses."""

    path: ClassVar[str] = "/v1/responses"
    errors: ClassVar[ErrorWords] = OpenAIErrors(names_events=True)
    fields: ClassVar[Mapping[str, Field]] = {
        "model": honoured("one of the served names; echoed"),
        "input": honoured(
            "a text, or messages, reasoning, function calls and their outputs; of users and functions also images and "
            "sounds"
        ),
        "instructions": honoured("the system message of this call"),
        "previous_response_id": honoured("one of the episode's last 256 responses"),
        "store": honoured("`false`: the response cannot be gone on from"),
        "tools": honoured("functions; `strict` is not enforced"),
        "tool_choice": honoured("`required` and a named function are served as `auto`, and violations are counted"),
        "parallel_tool_calls": honoured("`false` is not enforced; violations are counted"),
        "max_output_tokens": honoured("bounded by the run's own limit and the room in the context"),
        "temperature": honoured("0 to 2, in serving and evaluation; in training it is the run's"),
        "top_p": honoured("as `temperature`"),
        "stream": honoured("cut from the finished answer"),
        "include": honoured("`reasoning.encrypted_content`, of which there is none; all others are refused"),
        "chat_template_kwargs": honoured("variables of the chat template, over the run's; up to 8", {}),
        "metadata": honoured("echoed"),
        "text": honoured("`json_object` and `json_schema` as `format` where the backend can (vLLM), and without tools"),
        "top_logprobs": refused("use chat completions with `logprobs`", 0),
        "truncation": refused("shorten the history in the agent", "disabled"),
        "background": refused("leave it out: wait for the answer", False),
        "conversation": refused("use `previous_response_id`, or send the history"),
        "prompt": refused("send the prompt itself: `instructions` and `input`"),
        "context_management": refused("shorten the history in the agent", []),
        "moderation": refused("leave it out: nothing is moderated"),
        "image": refused("the policy writes text"),
        "access_programs": refused("leave it out"),
        "background_options": refused("leave it out: wait for the answer"),
        "reasoning": ignored("the policy reasons as it was trained to"),
        "stream_options": ignored("events are not obfuscated"),
        "max_tool_calls": ignored("it bounds built-in tools, of which there are none"),
        "user": ignored("the key says who asks"),
        "safety_identifier": ignored("the key says who asks"),
        "service_tier": ignored("there is one"),
        "prompt_cache_key": ignored("an episode's calls share their prefixes anyway"),
        "prompt_cache_options": ignored("likewise"),
        "prompt_cache_retention": ignored("likewise"),
    }

    async def answer(self, body: Mapping[str, Any], episode: OpenEpisode) -> Answer:
        tools = tools_of(body.get("tools", []), in_itself)
        history = (*_before(body, episode), *history_of(body.get("input")).messages)
        instructions = text_at(body.get("instructions", ""), "instructions")
        system: tuple[ChatMessage, ...] = ({"role": "system", "content": instructions},) if instructions else ()
        one_call = not flag_at(body.get("parallel_tool_calls", True), "parallel_tool_calls")
        choice = tool_choice_of(body.get("tool_choice", "auto"), tools, in_itself)
        question = Question((*system, *history), tools, choice, one_call, "text.format")
        schema = schema_of(object_at(body.get("text", {}), "text").get("format"), "text.format")
        require_no_calls(schema, tools, choice, "text.format")
        options = call_options(body, limits=("max_output_tokens",), stop="stop", json_schema=schema)
        is_kept = flag_at(body.get("store", True), "store")
        _require_harmless(body)
        said = await ask(episode, question, options)
        response = _response(body, said)
        episode.answers.add(response["id"], [said.reply.completion])
        if is_kept:
            episode.histories.put(response["id"], (*history, said.message))
        return Answer(response, lambda: events_of(response))


def _before(body: Mapping[str, Any], episode: OpenEpisode) -> Sequence[ChatMessage]:
    """The messages of the response that this one goes on from."""
    if "previous_response_id" not in body:
        return ()
    name = text_at(body["previous_response_id"], "previous_response_id")
    found = episode.histories.get(name)
    if found is None:
        raise RequestError(
            400,
            f"Previous response with id {shown(name)} not found",
            fix="this episode has no such response, or it was not stored: send the history",
            code="previous_response_not_found",
            param="previous_response_id",
        )
    return found


def _require_harmless(body: Mapping[str, Any]) -> None:
    for number, name in enumerate(list_at(body.get("include", []), "include")):
        if name not in HARMLESS:
            raise unsupported(f"include[{number}]", f"{shown(name)} cannot be served", fix="leave it out")


def _response(body: Mapping[str, Any], said: Said) -> dict[str, Any]:
    is_cut = said.finish_reason == "length"
    told = ("instructions", "previous_response_id", "max_output_tokens", "temperature", "top_p")
    prompt_tokens, output_tokens = said.reply.prompt_tokens, said.output_tokens
    now = time.time()
    return {
        "id": new_id("resp_"),
        "object": "response",
        "created_at": int(now),
        "completed_at": int(now),
        "status": "incomplete" if is_cut else "completed",
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "model": body["model"],
        "output": items_of(said),
        **{name: body.get(name) for name in told},
        "parallel_tool_calls": body.get("parallel_tool_calls", True),
        "tool_choice": body.get("tool_choice", "auto"),
        "tools": body.get("tools", []),
        "text": {"format": body.get("text", {}).get("format") or {"type": "text"}},
        "truncation": "disabled",
        "store": body.get("store", True),
        "metadata": body.get("metadata", {}),
        "usage": {
            "input_tokens": prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": output_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt_tokens + output_tokens,
        },
    }
