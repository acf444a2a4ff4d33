"""``POST /v1/chat/completions``."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from nemorl_rl.agents.contract import ChatMessage
from nemorl_rl.chat.text import TextCoder

from nemorl_agents.gateway.apis.base import (
    ErrorWords,
    OpenAIErrors,
    Question,
    Said,
    all_of,
    ask,
    event,
    fingerprint,
    messages_at,
    new_id,
    pieces,
)
from nemorl_agents.gateway.apis.contents import content_of, plain_text
from nemorl_agents.gateway.apis.formats import require_no_calls, schema_of
from nemorl_agents.gateway.apis.tools import (
    only_functions,
    tool_choice_of,
    tools_of,
    within_function,
)
from nemorl_agents.gateway.body import call_options, flag_at, list_at, object_at, samples, shown, text_at
from nemorl_agents.gateway.calls import Answer
from nemorl_agents.gateway.episodes import OpenEpisode
from nemorl_agents.gateway.errors import bad_field, unsupported
from nemorl_agents.gateway.fields import Field, honoured, ignored, refused

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


class ChatCompletions:
    """OpenAI's chat completions."""

    path: ClassVar[str] = "/v1/chat/completions"
    errors: ClassVar[ErrorWords] = OpenAIErrors()
    fields: ClassVar[Mapping[str, Field]] = {
        "model": honoured("one of the served names; echoed"),
        "messages": honoured(
            "roles system, developer (as system), user, assistant, tool; of users and tools also images and sounds"
        ),
        "tools": honoured("functions; `strict` is not enforced"),
        "tool_choice": honoured("`required` and a named tool are served as `auto`, and violations are counted"),
        "parallel_tool_calls": honoured("`false` is not enforced; violations are counted"),
        "max_tokens": honoured("bounded by the run's own limit and the room in the context"),
        "max_completion_tokens": honoured("as `max_tokens`; the smaller one holds"),
        "temperature": honoured("0 to 2, in serving and evaluation; in training it is the run's"),
        "top_p": honoured("as `temperature`"),
        "top_k": honoured("as `temperature`; 0 and -1 keep all tokens", 0, -1),
        "stop": honoured("up to 16 strings; they are not part of the answer"),
        "seed": honoured("in place of the episode's"),
        "chat_template_kwargs": honoured("variables of the chat template, over the run's; up to 8", {}),
        "n": honoured("up to 128 answers, each a call of the policy"),
        "stream": honoured("cut from the finished answer"),
        "stream_options": honoured("`include_usage`"),
        "logprobs": honoured("of the tokens as sampled, special ones and those of tool calls included"),
        "top_logprobs": refused("leave it out: log-probs of sampled tokens alone are known", 0),
        "response_format": honoured("`json_object` and `json_schema` where the backend can (vLLM), and without tools"),
        "frequency_penalty": refused("leave it out: penalties would change what is sampled", 0),
        "presence_penalty": refused("leave it out: penalties would change what is sampled", 0),
        "logit_bias": refused("leave it out: it would change what is sampled", {}),
        "functions": refused("use `tools`"),
        "function_call": refused("use `tool_choice`", "none"),
        "modalities": refused("the policy writes text", ["text"]),
        "audio": refused("the policy writes text"),
        "prediction": refused("leave it out: predicted outputs are not used"),
        "web_search_options": refused("search in the agent, by a tool"),
        "moderation": refused("leave it out: nothing is moderated"),
        "reasoning_effort": ignored("the policy reasons as it was trained to"),
        "verbosity": ignored("likewise"),
        "user": ignored("the key says who asks"),
        "metadata": ignored("nothing is kept"),
        "store": ignored("nothing is kept"),
        "service_tier": ignored("there is one"),
        "safety_identifier": ignored("the key says who asks"),
        "prompt_cache_key": ignored("an episode's calls share their prefixes anyway"),
        "prompt_cache_options": ignored("likewise"),
        "prompt_cache_retention": ignored("likewise"),
    }

    async def answer(self, body: Mapping[str, Any], episode: OpenEpisode) -> Answer:
        tools = tools_of(body.get("tools", []), within_function)
        question = Question(
            tuple(
                chat_message(one, f"messages[{i}]")
                for i, one in enumerate(messages_at(body.get("messages"), "messages"))
            ),
            tools,
            tool_choice_of(body.get("tool_choice", "auto"), tools, within_function),
            not flag_at(body.get("parallel_tool_calls", True), "parallel_tool_calls"),
        )
        schema = schema_of(body.get("response_format"), "response_format", inner="json_schema")
        require_no_calls(schema, tools, question.tool_choice, "response_format")
        wants_logprobs = flag_at(body.get("logprobs", False), "logprobs")
        text = episode.text if wants_logprobs else None
        limits = ("max_tokens", "max_completion_tokens")
        options = [
            call_options(body, limits=limits, stop="stop", number=i, json_schema=schema) for i in range(samples(body))
        ]
        says_usage = wants_usage(body)
        said = await all_of([ask(episode, question, one) for one in options])
        answer = _answer(body["model"], said, text, says_usage=says_usage)
        episode.answers.add(answer.payload["id"], [one.reply.completion for one in said])
        return answer


def wants_usage(body: Mapping[str, Any]) -> bool:
    """The stream is to end with the number of tokens."""
    options = object_at(body.get("stream_options", {}), "stream_options")
    return flag_at(options.get("include_usage", False), "stream_options.include_usage")


def chat_message(value: Any, place: str) -> ChatMessage:
    """One message, of which what the policy reads is kept."""
    message = object_at(value, place)
    role = ROLES.get(text_at(message.get("role"), f"{place}.role"))
    if role is None:
        raise bad_field(f"{place}.role", f"{shown(message['role'])} is no role", fix=f"roles are {', '.join(ROLES)}")
    content = message.get("content")
    kept: dict[str, Any] = {"role": role}
    read = content_of if role in ("user", "tool") else plain_text
    kept["content"] = read(content, f"{place}.content") if content is not None else None
    if role == "assistant":
        return {**kept, **_of_assistant(message, place)}
    if content is None:
        raise bad_field(f"{place}.content", "is missing")
    if role == "tool":
        kept["tool_call_id"] = text_at(message.get("tool_call_id"), f"{place}.tool_call_id")
    if message.get("name") is not None:
        kept["name"] = text_at(message["name"], f"{place}.name")
    return kept


def _of_assistant(message: Mapping[str, Any], place: str) -> dict[str, Any]:
    for name in ("function_call", "audio"):
        if message.get(name) is not None:
            raise unsupported(f"{place}.{name}", "is not served", fix="use content and tool_calls")
    kept: dict[str, Any] = {}
    calls = message.get("tool_calls") or []
    if calls:
        listed = list_at(calls, f"{place}.tool_calls")
        kept["tool_calls"] = [_tool_call(one, f"{place}.tool_calls[{i}]") for i, one in enumerate(listed)]
    if message.get("reasoning_content") is not None:
        kept["reasoning_content"] = text_at(message["reasoning_content"], f"{place}.reasoning_content")
    if message.get("content") is None and not calls:
        kept["content"] = ""
    return kept


def _tool_call(value: Any, place: str) -> Mapping[str, Any]:
    call = object_at(value, place)
    only_functions(call, place)
    function = object_at(call.get("function"), f"{place}.function")
    return {
        "id": text_at(call.get("id"), f"{place}.id"),
        "type": "function",
        "function": {
            "name": text_at(function.get("name"), f"{place}.function.name"),
            "arguments": text_at(function.get("arguments"), f"{place}.function.arguments"),
        },
    }


# Answers


def _answer(model: str, said: Sequence[Said], text: TextCoder | None, *, says_usage: bool) -> Answer:
    shared = {
        "id": new_id("chatcmpl-"),
        "created": int(time.time()),
        "model": model,
        "system_fingerprint": fingerprint(said[0].reply.completion),
    }
    usage = usage_of(said[0].reply.prompt_tokens, sum(one.output_tokens for one in said))
    logprobs = [_logprobs(one, text) if text else None for one in said]
    choices = [
        {
            "index": i,
            "message": {**one.message, "refusal": None},
            "logprobs": logprobs[i],
            "finish_reason": one.finish_reason,
        }
        for i, one in enumerate(said)
    ]
    payload = {**shared, "object": "chat.completion", "choices": choices, "usage": usage}

    def events() -> Iterator[bytes]:
        chunk = {**shared, "object": "chat.completion.chunk", **({"usage": None} if says_usage else {})}
        for i, one in enumerate(said):
            for delta in _deltas(one):
                choice = {"index": i, "delta": delta, "logprobs": None, "finish_reason": None}
                yield event({**chunk, "choices": [choice]})
            last = {"index": i, "delta": {}, "logprobs": logprobs[i], "finish_reason": one.finish_reason}
            yield event({**chunk, "choices": [last]})
        if says_usage:
            yield event({**chunk, "choices": [], "usage": usage})
        yield b"data: [DONE]\n\n"

    return Answer(payload, events)


def _deltas(said: Said) -> Iterator[Mapping[str, Any]]:
    yield {"role": "assistant", "content": "" if said.content or not said.tool_calls else None}
    yield from ({"reasoning_content": piece} for piece in pieces(said.reasoning))
    yield from ({"content": piece} for piece in pieces(said.content))
    for number, call in enumerate(said.tool_calls):
        function = {"name": call["function"]["name"], "arguments": ""}
        yield {"tool_calls": [{"index": number, "id": call["id"], "type": "function", "function": function}]}
        for piece in pieces(call["function"]["arguments"]):
            yield {"tool_calls": [{"index": number, "function": {"arguments": piece}}]}


def usage_of(prompt_tokens: int, completion_tokens: int) -> Mapping[str, int]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def _logprobs(said: Said, text: TextCoder) -> Mapping[str, Any]:
    completion = said.reply.completion
    entries = []
    for token_id, logprob in zip(completion.token_ids, completion.logprobs, strict=True):
        token = text.token(token_id)
        is_whole = "\ufffd" not in token
        encoded = [*token.encode()] if is_whole else None
        entries.append({"token": token, "logprob": logprob, "bytes": encoded, "top_logprobs": []})
    return {"content": entries, "refusal": None}
