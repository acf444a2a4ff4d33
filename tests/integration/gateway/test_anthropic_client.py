"""Anthropic's own client against a gateway."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import anthropic
import pytest
from nemorl_agents.gateway.gateway import Gateway
from nemorl_rl.agents.contract import CallLimitError, ChatReply, ContextOverflowError
from scripted_policy import Asked, ScriptedPolicy, calling, saying

ADD = {"name": "add", "description": "Adds.", "input_schema": {"type": "object", "properties": {}}}
CALLS = saying(
    "Let me add.",
    reasoning_content="I think",
    tool_calls=[calling("add", '{"a": 1,  "b": 2}')],
    finish_reason="tool_calls",
)


@pytest.fixture
def client(gateway: Gateway) -> Any:
    def connect(policy: ScriptedPolicy) -> anthropic.Anthropic:
        access = gateway.open(policy)
        return anthropic.Anthropic(base_url=access.base_url, api_key=access.api_key)

    return connect


def ask(client: anthropic.Anthropic, **fields: Any) -> Any:
    question = [{"role": "user", "content": "1+2?"}]
    return client.messages.create(**{"model": "policy", "max_tokens": 64, "messages": question, **fields})


def test_a_message_comes_out_as_it_was_said(client: Any) -> None:
    policy = ScriptedPolicy(lambda asked: CALLS)
    message = ask(client(policy), tools=[ADD], system=[{"type": "text", "text": "Be brief."}], extra_body={"top_k": 5})
    thought, text, call = message.content
    assert (thought.thinking, text.text) == ("I think", "Let me add.")
    assert (call.id, call.name, call.input) == ("call_1", "add", {"a": 1, "b": 2})
    assert message.stop_reason == "tool_use"
    assert (message.usage.input_tokens, message.usage.output_tokens) == (12, 11)
    (asked,) = policy.asked
    assert asked.messages[0] == {"role": "system", "content": "Be brief."}
    assert asked.tools[0]["function"] == {"name": "add", "description": "Adds.", "parameters": ADD["input_schema"]}
    assert (asked.options.max_new_tokens, asked.options.top_k) == (64, 5)


def test_what_the_client_echoes_is_what_it_was_given(client: Any) -> None:
    policy = ScriptedPolicy(lambda asked: CALLS)
    connected = client(policy)
    first = ask(connected, tools=[ADD])
    result = {"type": "tool_result", "tool_use_id": "call_1", "content": [{"type": "text", "text": "3"}]}
    told = {"role": "user", "content": [result, {"type": "text", "text": "Go on."}]}
    history = [{"role": "user", "content": "1+2?"}, {"role": "assistant", "content": first.content}, told]
    ask(connected, tools=[ADD], messages=history)
    # Arguments travel as an object: the spaces are lost, the id and the values are not.
    assert [*policy.asked[1].messages] == [
        {"role": "user", "content": "1+2?"},
        {**CALLS.message, "tool_calls": [calling("add", '{"a": 1, "b": 2}')]},
        {"role": "tool", "tool_call_id": "call_1", "content": "3"},
        {"role": "user", "content": "Go on."},
    ]


def test_a_stream_adds_up_to_the_same_message(client: Any) -> None:
    policy = ScriptedPolicy(lambda asked: CALLS)
    connected = client(policy)
    with connected.messages.stream(
        model="policy", max_tokens=64, tools=[ADD], messages=[{"role": "user", "content": "1+2?"}]
    ) as stream:
        streamed = stream.get_final_message()
    whole = ask(connected, tools=[ADD])
    without_id = {"id": None}
    assert streamed.model_copy(update=without_id).to_dict(exclude_none=True) == whole.model_copy(
        update=without_id
    ).to_dict(exclude_none=True)


def test_a_stop_sequence_is_named(client: Any) -> None:
    policy = ScriptedPolicy(lambda asked: saying("Thought.\n", sampled="Thought.\nObservation:"))
    message = ask(client(policy), stop_sequences=["Observation:", "Result:"])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "Observation:")
    assert message.content[0].text == "Thought.\n"
    assert message.usage.output_tokens == len("Thought.\nObservation:")
    assert ask(client(policy), stop_sequences=["Result:"]).stop_reason == "end_turn"
    assert policy.asked[0].options.stop == ("Observation:", "Result:")


def test_tokens_are_counted_without_an_answer(client: Any) -> None:
    policy = ScriptedPolicy()
    counted = client(policy).messages.count_tokens(model="policy", messages=[{"role": "user", "content": "12345"}])
    assert counted.input_tokens == 5 + len("[]")
    assert policy.asked == []


def test_a_stream_that_fails_late_is_an_error_of_the_client(client: Any) -> None:
    begun = threading.Event()  # the stream begins after 0.2 s

    async def say() -> ChatReply:
        while not begun.is_set():
            await asyncio.sleep(0.01)
        raise ContextOverflowError(70, 64)

    answer = ask(client(ScriptedPolicy(lambda asked: say())), stream=True)
    begun.set()
    with pytest.raises(anthropic.APIStatusError) as caught:
        list(answer)
    assert "prompt is too long: 70 tokens > 64 maximum" in str(caught.value)


def test_errors_are_worded_as_this_api_does(client: Any) -> None:
    def say(asked: Asked) -> ChatReply:
        raise ContextOverflowError(70, 64) if len(policy.asked) == 1 else CallLimitError("it has had its 5 answers")

    policy = ScriptedPolicy(say)
    connected = client(policy)
    with pytest.raises(anthropic.BadRequestError) as caught:
        ask(connected)
    assert "prompt is too long: 70 tokens > 64 maximum" in str(caught.value)
    with pytest.raises(anthropic.RateLimitError) as caught:
        ask(connected)
    assert "5 answers" in str(caught.value)
    assert len(policy.asked) == 2
    with pytest.raises(anthropic.NotFoundError) as caught:
        ask(connected, model="claude")
    assert "does not exist" in str(caught.value)
    with pytest.raises(anthropic.AuthenticationError):
        ask(connected.with_options(api_key="nemorl-wrong"))
    with pytest.raises(anthropic.BadRequestError) as caught:
        ask(connected, messages=[{"role": "user", "content": "?"}, {"role": "assistant", "content": "The"}])
    assert "begun by the client" in str(caught.value)
