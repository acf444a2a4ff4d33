"""What real clients send back of an answer, as data: all but one are recognised, and prompts go on from its tokens.

The forms were recorded from openai 3.54.0, openai-agents 0.24.0, pydantic-ai-slim 2.68.0, langchain-openai 1.7.3 and
smolagents 1.26.0, each after the same answer: content "Let me add.", reasoning, one call.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from chat_models import ADD, Engine, template, tokenizer_of
from nemorl.types import Completion
from nemorl_rl.chat.codec import codec_of
from nemorl_rl.chat.conversation import ChatPrompt, Conversation

ANSWER = (
    "<think>\nI think\n</think>\n\nLet me add.\n"
    '<tool_call>\n{"name": "add", "arguments": {"a": 1,  "b": 2}}\n</tool_call>'
)
ASKED = [{"role": "system", "content": "Be terse."}, {"role": "user", "content": "1 + 2?"}]

Echo = Callable[[dict[str, Any]], list[dict[str, Any]]]


def _call(answer: dict[str, Any], arguments: str) -> list[dict[str, Any]]:
    [call] = answer["tool_calls"]
    return [{**call, "function": {**call["function"], "arguments": arguments}}]


def _result(answer: dict[str, Any]) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": answer["tool_calls"][0]["id"], "content": "3"}


def openai(answer: dict[str, Any]) -> list[dict[str, Any]]:
    return [answer, _result(answer)]


def openai_agents(answer: dict[str, Any]) -> list[dict[str, Any]]:
    return [{key: answer[key] for key in ("role", "content", "tool_calls")}, _result(answer)]


def openai_agents_responses(answer: dict[str, Any]) -> list[dict[str, Any]]:
    """Items that a gateway writes as messages of their own."""
    calls = {"role": "assistant", "content": None, "tool_calls": answer["tool_calls"]}
    return [{"role": "assistant", "content": answer["content"]}, calls, _result(answer)]


def pydantic_ai(answer: dict[str, Any]) -> list[dict[str, Any]]:
    return [{**answer, "tool_calls": _call(answer, '{"a":1,"b":2}')}, _result(answer)]


def langgraph(answer: dict[str, Any]) -> list[dict[str, Any]]:
    echo = {"role": "assistant", "content": answer["content"], "tool_calls": _call(answer, '{"a": 1, "b": 2}')}
    return [echo, _result(answer)]


def anthropic(answer: dict[str, Any]) -> list[dict[str, Any]]:
    """Blocks that a gateway writes as parts; the input of a tool is an object on its way."""
    content = [{"type": "text", "text": answer["content"]}]
    echo = {"role": "assistant", "content": content, "tool_calls": _call(answer, '{"b": 2, "a": 1}')}
    return [echo, {**_result(answer), "content": [{"type": "text", "text": "3"}]}]


def without_text(answer: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "assistant", "content": None, "tool_calls": answer["tool_calls"]}, _result(answer)]


def smolagents(answer: dict[str, Any]) -> list[dict[str, Any]]:
    said = f"Let me add.\nCalling tools:\n[{{'id': '{answer['tool_calls'][0]['id']}', 'type': 'function', 'function': …"
    parts = [[{"type": "text", "text": text}] for text in (said, "Observation:\n3")]
    return [{"role": "assistant", "content": parts[0]}, {"role": "user", "content": parts[1]}]


@pytest.fixture
def engine() -> Engine:
    return Engine(tokenizer_of(template("qwen3")))


def first_call(engine: Engine) -> tuple[Conversation, ChatPrompt, Completion, dict[str, Any]]:
    conversation = Conversation(codec_of(engine.tokenizer), seed=5)
    prompt = conversation.prompt(ASKED, [ADD])
    completion = engine.say(prompt, ANSWER)
    return conversation, prompt, completion, dict(conversation.reply(prompt, completion).message)


def test_the_answer_is_taken_apart(engine: Engine) -> None:
    *_, message = first_call(engine)
    [call] = message["tool_calls"]
    assert (message["content"], message["reasoning_content"]) == ("Let me add.", "I think")
    assert call["function"] == {"name": "add", "arguments": '{"a": 1,  "b": 2}'}
    assert re.fullmatch("call_[0-9a-z]{24}", call["id"])


@pytest.mark.parametrize(
    "echo",
    [openai, openai_agents, openai_agents_responses, pydantic_ai, langgraph, anthropic, without_text],
    ids=lambda echo: echo.__name__,
)
def test_a_client_s_second_request_goes_on_from_the_tokens_of_the_first(engine: Engine, echo: Echo) -> None:
    conversation, prompt, completion, message = first_call(engine)
    second = conversation.prompt([*ASKED, *echo(message)], [ADD])
    recorded = (*prompt.token_ids, *completion.token_ids)
    assert second.token_ids[: len(recorded)] == recorded
    assert second.realigned_tokens == 0
    added = "\n<|im_start|>user\n<tool_response>\n3\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    assert engine.text(second.token_ids[len(recorded) :]) == added


def test_a_call_that_a_client_wrote_as_text_is_not_recognised(engine: Engine) -> None:
    conversation, prompt, _, message = first_call(engine)
    second = conversation.prompt([*ASKED, *smolagents(message)], [ADD])
    assert second.token_ids[: len(prompt.token_ids)] == prompt.token_ids
    assert "<think>" not in engine.text(second.token_ids)
    assert second.realigned_tokens == 0, "nothing was recognised"
