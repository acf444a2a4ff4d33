"""OpenAI's own client against a gateway: its objects come out as the policy spoke."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import httpx2
import openai
import pytest
from nemorl_agents.gateway.gateway import Gateway
from nemorl_rl.agents.contract import CallLimitError, ChatReply, ContextOverflowError, EpisodeClosedError
from scripted_policy import Asked, ScriptedPolicy, calling, saying
from test_rough_clients import until

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    },
}
CALLS = saying(
    "Let me add.",
    reasoning_content="I think",
    tool_calls=[calling("add", '{"a": 1,  "b": 2}')],
    finish_reason="tool_calls",
)
"""The answer that the clients of agents.md were given: two spaces in the arguments."""


@pytest.fixture
def client(gateway: Gateway) -> Any:
    def connect(policy: ScriptedPolicy, **options: Any) -> openai.OpenAI:
        access = gateway.open(policy)
        return openai.OpenAI(base_url=access.openai_base_url, api_key=access.api_key, **options)

    return connect


def ask(client: openai.OpenAI, **fields: Any) -> Any:
    return client.chat.completions.create(
        **{"model": "policy", "messages": [{"role": "user", "content": "1+2?"}], **fields}
    )


def test_a_reply_comes_out_as_it_was_said(client: Any) -> None:
    policy = ScriptedPolicy(lambda asked: CALLS)
    answer = ask(client(policy), tools=[ADD])
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me add."
    assert choice.message.reasoning_content == "I think"
    (call,) = choice.message.tool_calls
    assert (call.id, call.function.name, call.function.arguments) == ("call_1", "add", '{"a": 1,  "b": 2}')
    # The prompt had 12 tokens, and "Let me add." has 11 bytes.
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (12, 11, 23)
    assert policy.asked[0].tools == (ADD,)


def test_what_the_client_echoes_is_what_it_was_given(client: Any) -> None:
    policy = ScriptedPolicy(lambda asked: CALLS)
    connected = client(policy)
    first = ask(connected, tools=[ADD])
    history = [{"role": "user", "content": "1+2?"}, first.choices[0].message]
    ask(connected, tools=[ADD], messages=[*history, {"role": "tool", "tool_call_id": "call_1", "content": "3"}])
    assert [*policy.asked[1].messages] == [
        {"role": "user", "content": "1+2?"},
        CALLS.message,
        {"role": "tool", "tool_call_id": "call_1", "content": "3"},
    ]


def test_a_stream_adds_up_to_the_same_reply(client: Any) -> None:
    long = "word " * 200
    policy = ScriptedPolicy(lambda asked: saying(long, tool_calls=[calling("add", "{}")], finish_reason="tool_calls"))
    with client(policy).chat.completions.stream(
        model="policy", messages=[{"role": "user", "content": "?"}], tools=[ADD], stream_options={"include_usage": True}
    ) as stream:
        answer = stream.get_final_completion()
    (choice,) = answer.choices
    assert choice.message.content == long
    assert choice.message.tool_calls[0].id == "call_1"
    assert choice.finish_reason == "tool_calls"
    assert answer.usage.total_tokens == 12 + 1000


def test_usage_is_streamed_only_where_it_is_asked_for(client: Any) -> None:
    chunks = list(ask(client(ScriptedPolicy()), stream=True))
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None, None, "stop"]
    assert all(chunk.usage is None for chunk in chunks)


def test_several_answers_are_several_calls_with_seeds_of_their_own(client: Any) -> None:
    policy = ScriptedPolicy(lambda asked: saying(str(len(asked.messages))))
    answer = ask(client(policy), n=3, seed=5)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert answer.usage.prompt_tokens == 12  # one prompt
    assert answer.usage.completion_tokens == 3
    seeds = [asked.options.seed for asked in policy.asked]
    assert seeds[0] == 5
    assert len({*seeds}) == 3


def test_logprobs_are_those_of_the_sampled_tokens(client: Any) -> None:
    answer = ask(client(ScriptedPolicy(lambda asked: saying("ab"))), logprobs=True)
    entries = answer.choices[0].logprobs.content
    assert [(entry.token, entry.logprob, entry.bytes) for entry in entries] == [("a", -0.5, [97]), ("b", -0.5, [98])]


@pytest.mark.parametrize(
    ("raised", "expected", "status", "code"),
    [
        (ContextOverflowError(70, 64), openai.BadRequestError, 400, "context_length_exceeded"),
        (CallLimitError("it has had its 5 answers"), openai.RateLimitError, 429, "call_limit_reached"),
        (EpisodeClosedError("it has ended"), openai.ConflictError, 409, "episode_closed"),
        (RuntimeError("secret of another episode"), openai.InternalServerError, 500, "policy_failed"),
    ],
)
def test_the_end_of_an_episode_is_an_error_that_is_not_tried_again(
    client: Any, gateway: Gateway, raised: Exception, expected: type[openai.APIStatusError], status: int, code: str
) -> None:
    def say(asked: Asked) -> ChatReply:
        raise raised

    policy = ScriptedPolicy(say)
    with pytest.raises(expected) as caught:
        ask(client(policy))
    assert (caught.value.status_code, caught.value.code) == (status, code)
    assert "secret" not in str(caught.value)
    assert len(policy.asked) == 1
    if status == 400:
        assert "maximum context length is 64 tokens" in str(caught.value)


def test_another_models_name_and_another_key_are_refused(client: Any) -> None:
    connected = client(ScriptedPolicy())
    with pytest.raises(openai.NotFoundError) as caught:
        ask(connected, model="gpt-4o")
    assert caught.value.code == "model_not_found"
    other = client(ScriptedPolicy())
    with pytest.raises(openai.AuthenticationError):
        ask(connected.with_options(api_key=other.api_key))
    assert [model.id for model in connected.models.list()] == ["policy"]


def test_a_stream_that_fails_late_is_an_error_of_the_client(client: Any) -> None:
    policy, begun = ScriptedPolicy(), threading.Event()  # the stream begins after 0.2 s

    async def say() -> ChatReply:
        while not begun.is_set():
            await asyncio.sleep(0.01)
        begun.clear()
        raise ContextOverflowError(70, 64)

    policy.say = lambda asked: say()
    connected = client(policy)
    answer = ask(connected, stream=True)
    begun.set()
    with pytest.raises(openai.APIError) as caught:
        list(answer)
    assert "maximum context length" in str(caught.value)
    answer = connected.responses.create(model="policy", input="1+2?", stream=True)
    begun.set()
    (event,) = answer
    assert (event.type, event.code) == ("error", "context_length_exceeded")


def test_a_client_that_gives_up_and_tries_again_gets_an_answer_of_its_own(client: Any) -> None:
    """The first call is cancelled when its client hangs up, and is no turn of the episode."""
    policy = ScriptedPolicy()

    class GivesUpTheFirst(openai.DefaultHttpxClient):
        def send(self, request: Any, **options: Any) -> Any:
            if not policy.asked:
                request.extensions["trace"] = self.give_up
            return super().send(request, **options)

        def give_up(self, event: str, _: object) -> None:
            if event == "http11.receive_response_headers.started":
                until(lambda: len(policy.asked) == 1)
                raise httpx2.ReadTimeout("as the policy thinks")

    async def slow() -> ChatReply:
        await asyncio.sleep(300)
        raise AssertionError("nobody waits for this")

    policy.say = lambda asked: slow() if len(policy.asked) == 1 else saying("4")
    answer = ask(client(policy, http_client=GivesUpTheFirst(), max_retries=1))
    assert answer.choices[0].message.content == "4"
    until(lambda: policy.cancelled == 1)
    assert len(policy.asked) == 2


def test_an_answer_that_was_lost_on_its_way_is_given_again(gateway: Gateway) -> None:
    """The SDK marks its second attempt, whose body is the same: the policy is asked once."""

    class LosesTheFirst(openai.DefaultHttpxClient):
        lost = 0

        def send(self, request: Any, **options: Any) -> Any:
            answer = super().send(request, **options)
            if not self.lost:
                self.lost += 1
                raise httpx2.ReadError("on the way back")
            return answer

    policy = ScriptedPolicy(lambda asked: saying(f"answer {len(policy.asked)}"))
    access = gateway.open(policy)
    client = openai.OpenAI(base_url=access.openai_base_url, api_key=access.api_key, http_client=LosesTheFirst())
    assert ask(client).choices[0].message.content == "answer 1"
    assert ask(client).choices[0].message.content == "answer 2"
    traffic = gateway.close(access)
    assert (traffic.requests, traffic.retries) == (3, 1)


# Responses


def test_a_response_comes_out_as_it_was_said(client: Any) -> None:
    policy = ScriptedPolicy(lambda asked: CALLS)
    tool = {"type": "function", **ADD["function"], "strict": True}  # type: ignore[dict-item]
    answer = client(policy).responses.create(model="policy", instructions="Be brief.", input="1+2?", tools=[tool])
    thought, said, call = answer.output
    assert thought.content[0].text == "I think"
    assert said.content[0].text == answer.output_text == "Let me add."
    assert (call.call_id, call.name, call.arguments) == ("call_1", "add", '{"a": 1,  "b": 2}')
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (12, 11)
    assert [*policy.asked[0].messages] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1+2?"},
    ]
    assert policy.asked[0].tools == (ADD,)


@pytest.mark.parametrize("stored", [True, False])
def test_a_response_is_gone_on_from_by_its_items_or_by_its_id(client: Any, stored: bool) -> None:
    policy = ScriptedPolicy(lambda asked: CALLS)
    connected = client(policy)
    tool = {"type": "function", **ADD["function"]}  # type: ignore[dict-item]
    first = connected.responses.create(model="policy", input="1+2?", tools=[tool], store=stored)
    result = {"type": "function_call_output", "call_id": "call_1", "output": "3"}
    if stored:
        connected.responses.create(model="policy", previous_response_id=first.id, input=[result], tools=[tool])
    else:
        with pytest.raises(openai.BadRequestError) as caught:
            connected.responses.create(model="policy", previous_response_id=first.id, input=[result])
        assert "not found" in str(caught.value)
        echoed = [{"role": "user", "content": "1+2?"}, *first.output, result]
        connected.responses.create(model="policy", input=echoed, tools=[tool])
    assert [*policy.asked[1].messages] == [
        {"role": "user", "content": "1+2?"},
        CALLS.message,
        {"role": "tool", "tool_call_id": "call_1", "content": "3"},
    ]


def test_a_stream_of_events_adds_up_to_the_response(client: Any) -> None:
    policy = ScriptedPolicy(lambda asked: CALLS)
    with client(policy).responses.stream(model="policy", input="1+2?") as stream:
        events = list(stream)
        answer = stream.get_final_response()
    assert [item.type for item in answer.output] == ["reasoning", "message", "function_call"]
    assert answer.output_text == "Let me add."
    assert answer.output[2].arguments == '{"a": 1,  "b": 2}'
    assert answer.usage.total_tokens == 23
    assert [event.sequence_number for event in events] == [*range(len(events))]


# Completions


def test_a_completion_goes_on_from_text_and_from_tokens(client: Any) -> None:
    policy = ScriptedPolicy(lambda asked: saying(asked.messages[0]["content"] + "!end"))
    answer = client(policy).completions.create(model="policy", prompt=["ab", "c"], stop="end", logprobs=0)
    assert [choice.text for choice in answer.choices] == ["ab!", "c!"]
    assert answer.choices[1].logprobs.tokens == ["c", "!", "e", "n", "d"]
    assert answer.choices[1].logprobs.text_offset == [0, 1, 2, 3, 4]
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 11)
    assert client(policy).completions.create(model="policy", prompt=[100, 101]).choices[0].text == "de!end"
    chunks = list(client(policy).completions.create(model="policy", prompt="x", stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == "x!end"
