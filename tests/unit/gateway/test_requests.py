"""Whose a request is, what it may hold, and what becomes of it when its client repeats itself or its episode ends."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import pytest
from nemorl_agents.gateway.gateway import GatewayOptions
from nemorl_rl.agents.contract import ChatReply
from scripted_policy import Asked, ScriptedPolicy, calling, saying

CHAT = "/v1/chat/completions"
USER = {"role": "user", "content": "1+2?"}
ASK = {"model": "policy", "messages": [USER]}
RETRY = {"x-stainless-retry-count": "1"}


def error_of(answer: Any) -> dict[str, Any]:
    found: dict[str, Any] = answer.json()["error"]
    return found


# Whose it is


def test_an_episode_is_reached_with_its_own_address_and_key_alone(open_talk: Any, talk: Any) -> None:
    other_key = {"authorization": f"Bearer {open_talk().key}"}
    assert talk.post(CHAT, ASK).status_code == 200
    for headers in (other_key, {"authorization": "Bearer"}, {"authorization": "Basic abc"}, {"authorization": ""}):
        answer = talk.post(CHAT, ASK, headers=headers)
        assert (answer.status_code, error_of(answer)["code"]) == (401, "invalid_api_key")
    assert len(talk.policy.asked) == 1


def test_a_key_that_is_no_ascii_is_a_wrong_key(talk: Any) -> None:
    assert talk.post(CHAT, ASK, headers={"authorization": b"Bearer nemorl-\xe9"}).status_code == 401


def test_an_episode_that_never_was_is_404_and_one_that_ended_409(talk: Any) -> None:
    headers = {"authorization": f"Bearer {talk.key}"}
    answer = talk.client.post(f"/e/nowhere{CHAT}", json=ASK, headers=headers)
    assert (answer.status_code, error_of(answer)["code"]) == (404, "not_found")
    assert talk.client.post(CHAT, json=ASK, headers=headers).status_code == 404  # nobody is at the root
    talk.doors.dismiss(talk.name)
    answer = talk.post(CHAT, ASK)
    assert (answer.status_code, error_of(answer)["code"]) == (409, "episode_closed")
    assert answer.headers["x-should-retry"] == "false"
    assert talk.post(CHAT, ASK, headers={"authorization": "Bearer nemorl-0"}).status_code == 404


def test_an_error_speaks_the_language_of_its_client(talk: Any) -> None:
    answer = talk.client.post(f"/e/{talk.name}/v1/nothing", json={})
    assert (answer.status_code, error_of(answer)["type"]) == (404, "invalid_request_error")
    answer = talk.client.post("/v1/complete", json={}, headers={"anthropic-version": "2023-06-01"})
    assert answer.json()["type"] == "error"
    assert error_of(answer)["type"] == "not_found_error"
    assert talk.client.get(f"/e/{talk.name}{CHAT}").status_code == 405
    assert talk.client.get(f"/e/{talk.name}/v1/models").status_code == 401


def test_models_and_health(talk: Any) -> None:
    assert talk.client.get("/healthz").json() == {"status": "ok"}
    assert [model["id"] for model in talk.get("/v1/models").json()["data"]] == ["policy"]
    assert talk.get("/v1/models/policy").json()["id"] == "policy"
    assert error_of(talk.get("/v1/models/gpt-4o"))["code"] == "model_not_found"


def test_a_star_in_a_models_name_stands_for_anything(open_talk: Any) -> None:
    talk = open_talk(options=GatewayOptions(models=("policy", "gpt-*[x]")))
    for name, status in (("gpt-4[x]", 200), ("gpt-[x]", 200), ("gpt-4x", 404), ("xgpt-[x]", 404), ("", 404)):
        assert talk.post(CHAT, {**ASK, "model": name}).status_code == status
    assert talk.post(CHAT, {**ASK, "model": "gpt-4[x]"}).json()["model"] == "gpt-4[x]"
    assert [model["id"] for model in talk.get("/v1/models").json()["data"]] == ["policy"]


# What it may hold


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (b"", "no JSON"),
        (b"{", "no JSON"),
        (b"\xff\xfe", "no JSON"),
        (b"[1]", "a list, not a JSON object"),
        (b'{"model": NaN}', "NaN is no number"),
        (b'{"model": ' + b"[" * 40_000, "nested too deeply"),
        (b'{"model": "\\ud800"}', "surrogate"),
    ],
)
def test_what_is_no_json_is_the_apis_own_error(talk: Any, raw: bytes, why: str) -> None:
    for path in (CHAT, "/v1/messages", "/v1/responses"):
        answer = talk.post(path, raw=raw)
        assert answer.status_code == 400
        assert why in error_of(answer)["message"]
    assert talk.episode.traffic.refused == 3


def test_a_pair_of_surrogates_is_text(talk: Any) -> None:
    raw = json.dumps({**ASK, "messages": [{"role": "user", "content": "\U0001f600"}]}).encode()
    assert b"\\ud83d" in raw
    assert talk.post(CHAT, raw=raw).status_code == 200
    assert talk.policy.asked[0].messages[0]["content"] == "\U0001f600"


def test_ten_megabytes_of_messages_are_too_many(talk: Any) -> None:
    long = {"role": "user", "content": "x" * 1_000_000}
    answer = talk.post(CHAT, {**ASK, "messages": [long] * 10})
    assert (answer.status_code, error_of(answer)["code"]) == (413, "request_too_large")
    anthropic = talk.post("/v1/messages", {**ASK, "max_tokens": 5, "messages": [long]})
    assert (anthropic.status_code, error_of(anthropic)["type"]) == (413, "request_too_large")


@pytest.mark.parametrize(
    ("parameters", "place"),
    [
        ("object", "parameters"),
        ({"type": "string"}, "parameters.type"),
        ({"type": "object", "properties": []}, "parameters.properties"),
        ({"type": "object", "properties": {"a": {"type": "float"}}}, "parameters.properties.a.type"),
        ({"type": "object", "properties": {"a": 5}}, "parameters.properties.a"),
        ({"type": "object", "required": "a"}, "parameters.required"),
        ({"type": "object", "properties": {"a": {"type": "array", "items": 1}}}, "parameters.properties.a.items"),
        ({"type": "object", "anyOf": [{"enum": 1}]}, "parameters.anyOf[0].enum"),
    ],
)
def test_a_broken_tool_schema_is_named_to_the_place(talk: Any, parameters: Any, place: str) -> None:
    good = {
        "type": "function",
        "function": {"name": "ok", "parameters": {"properties": {"x": {"type": ["string", "null"]}}}},
    }
    bad = {"type": "function", "function": {"name": "add", "parameters": parameters}}
    answer = talk.post(CHAT, {**ASK, "tools": [good, bad]})
    assert (answer.status_code, error_of(answer)["param"]) == (400, f"tools[1].function.{place}")
    schema = place.replace("parameters", "input_schema")
    tool = {"name": "add", "input_schema": parameters}
    answer = talk.post("/v1/messages", {**ASK, "max_tokens": 5, "tools": [tool]})
    assert error_of(answer)["message"].startswith(f"tools[0].{schema}: ")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a"}}] * 2}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "maybe"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice.function.name"),
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [USER, {"role": "robot", "content": ""}]}, "messages[1].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].image_url"),
        ({"messages": [{"role": "tool", "content": "3"}]}, "messages[0].tool_call_id"),
        (
            {
                "messages": [
                    USER,
                    {"role": "assistant", "tool_calls": [{"type": "function", "id": "c", "function": {}}]},
                ]
            },
            "messages[1].tool_calls[0].function.name",
        ),
        ({"stop": [""]}, "stop"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ],
)
def test_what_makes_no_sense_is_named_to_the_place(talk: Any, fields: dict[str, Any], param: str) -> None:
    answer = talk.post(CHAT, {**ASK, **fields})
    assert (answer.status_code, error_of(answer)["param"]) == (400, param)
    assert talk.policy.asked == []


# What is answered


def test_a_choice_of_tools_is_passed_on_and_what_breaks_it_is_counted(open_talk: Any) -> None:
    calls = [calling("a", "{}"), calling("a", "{}", call_id="call_2")]
    talk = open_talk(ScriptedPolicy(lambda asked: saying(tool_calls=calls, broke_tool_choice=asked.tool_choice == "b")))
    tools = [{"type": "function", "function": {"name": name}} for name in "ab"]
    asked = {**ASK, "tools": tools}
    talk.post(CHAT, {**asked, "tool_choice": "required", "parallel_tool_calls": False})  # two calls
    talk.post(CHAT, {**asked, "tool_choice": {"type": "function", "function": {"name": "b"}}})
    talk.post(
        "/v1/messages",
        {
            "model": "policy",
            "messages": [USER],
            "max_tokens": 5,
            "tools": [{"name": "a", "input_schema": {}}],
            "tool_choice": {"type": "any"},
        },
    )
    assert [one.tool_choice for one in talk.policy.asked] == ["required", "b", "required"]
    assert talk.episode.traffic.broken_tool_choices == 2
    assert talk.episode.traffic.metrics()["gateway_broken_tool_choices"] == 2.0


def test_a_stream_is_the_answer_cut_into_events(open_talk: Any) -> None:
    talk = open_talk(
        ScriptedPolicy(lambda asked: saying("Hi", tool_calls=[calling("add", "{}")], finish_reason="tool_calls"))
    )
    answer = talk.post(CHAT, {**ASK, "stream": True, "stream_options": {"include_usage": True}})
    assert answer.headers["content-type"].startswith("text/event-stream")
    *events, done, end = answer.text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert [chunk["choices"][0]["delta"] for chunk in chunks[:-1]] == [
        {"role": "assistant", "content": ""},
        {"content": "Hi"},
        {
            "tool_calls": [
                {"index": 0, "id": "call_1", "type": "function", "function": {"name": "add", "arguments": ""}}
            ]
        },
        {"tool_calls": [{"index": 0, "function": {"arguments": "{}"}}]},
        {},
    ]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]] == [None, None, None, None, "tool_calls"]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == {"prompt_tokens": 12, "completion_tokens": 2, "total_tokens": 14}


def test_items_of_one_turn_are_one_message(talk: Any) -> None:
    items = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "input_text", "text": "1+2?"}, {"type": "input_text", "text": "3+4?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "function_call", "call_id": "c1", "name": "add", "arguments": "{}"},
        {"type": "function_call", "call_id": "c2", "name": "add", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "3"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "7"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "3 and 7"}]},
        {"type": "reasoning", "id": "rs_2", "summary": [{"type": "summary_text", "text": "More."}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Indeed."}]},
    ]
    assert talk.post("/v1/responses", {"model": "policy", "input": items}).status_code == 200
    assert [*talk.policy.asked[0].messages] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1+2?\n3+4?"},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "Hm.",
            "tool_calls": [calling("add", "{}", call_id="c1"), calling("add", "{}", call_id="c2")],
        },
        {"role": "tool", "content": "3", "tool_call_id": "c1"},
        {"role": "tool", "content": "7", "tool_call_id": "c2"},
        {"role": "assistant", "content": "3 and 7"},
        {"role": "assistant", "content": "Indeed.", "reasoning_content": "More."},
    ]


def test_an_error_of_the_policy_is_kept_for_the_driver_and_not_told(open_talk: Any) -> None:
    def say(asked: Asked) -> ChatReply:
        raise RuntimeError("episode 9.9 said: secret")

    talk = open_talk(ScriptedPolicy(say))
    answer = talk.post(CHAT, ASK)
    assert answer.status_code == 500
    assert error_of(answer) == {
        "message": "the policy could not answer (RuntimeError)",
        "type": "server_error",
        "param": None,
        "code": "policy_failed",
    }
    assert talk.post(CHAT, {**ASK, "stream": True}).status_code == 500
    assert talk.episode.traffic.failures == 2
    assert str(talk.episode.traffic.failure) == "episode 9.9 said: secret"


# Clients that repeat themselves


def test_a_marked_retry_gets_the_recorded_answer_and_an_unmarked_one_another(talk: Any) -> None:
    answers = [talk.post(CHAT, ASK, headers=headers).json()["id"] for headers in ({}, RETRY, {}, RETRY)]
    assert answers[0] == answers[1]
    assert answers[2] == answers[3]
    assert answers[1] != answers[2]
    assert len(talk.policy.asked) == 2
    assert (talk.episode.traffic.requests, talk.episode.traffic.retries) == (4, 2)
    # Another body, or another API, has another answer.
    talk.post(CHAT, {**ASK, "temperature": 1}, headers=RETRY)
    assert len(talk.policy.asked) == 3


def test_a_retry_of_what_failed_is_tried_anew(open_talk: Any) -> None:
    def say(asked: Asked) -> ChatReply:
        if len(policy.asked) == 1:
            raise RuntimeError("once")
        return saying("4")

    policy = ScriptedPolicy(say)
    talk = open_talk(policy)
    assert talk.post(CHAT, ASK).status_code == 500
    assert talk.post(CHAT, ASK, headers=RETRY).status_code == 200


class Waiting:
    """Answers when told to."""

    def __init__(self) -> None:
        self.asked, self.may_answer = threading.Semaphore(0), threading.Event()

    async def say(self) -> ChatReply:
        self.asked.release()
        while not self.may_answer.is_set():
            await asyncio.sleep(0.01)
        return saying("4")


def side_by_side(talk: Any, *headers: dict[str, str]) -> tuple[list[threading.Thread], list[Any]]:
    answers: list[Any] = []
    threads = [
        threading.Thread(target=lambda one=one: answers.append(talk.post(CHAT, ASK, headers=one))) for one in headers
    ]
    return threads, answers


def test_a_retry_waits_with_the_request_that_it_repeats(open_talk: Any) -> None:
    waiting = Waiting()
    talk = open_talk(ScriptedPolicy(lambda asked: waiting.say()))
    (first, second), answers = side_by_side(talk, {}, RETRY)
    first.start()
    assert waiting.asked.acquire(timeout=20)
    second.start()
    while talk.episode.traffic.retries == 0:
        pass
    waiting.may_answer.set()
    first.join()
    second.join()
    assert answers[0].json() == answers[1].json()
    assert len(talk.policy.asked) == 1


def test_too_many_requests_at_once_may_come_again(open_talk: Any) -> None:
    waiting = Waiting()
    talk = open_talk(ScriptedPolicy(lambda asked: waiting.say()))
    threads, answers = side_by_side(talk, {}, {})
    for thread in threads:
        thread.start()
    assert waiting.asked.acquire(timeout=20)
    assert waiting.asked.acquire(timeout=20)
    answer = talk.post(CHAT, ASK)  # two run, and no more may
    assert (answer.status_code, error_of(answer)["code"]) == (429, "too_many_requests")
    assert answer.headers["x-should-retry"] == "true"
    waiting.may_answer.set()
    for thread in threads:
        thread.join()
    assert [one.status_code for one in answers] == [200, 200]


def test_an_episode_that_is_closed_ends_what_runs(open_talk: Any) -> None:
    waiting = Waiting()
    talk = open_talk(ScriptedPolicy(lambda asked: waiting.say()))
    threads, answers = side_by_side(talk, {})
    threads[0].start()
    assert waiting.asked.acquire(timeout=20)
    episode = talk.doors.dismiss(talk.name)
    talk.client.portal.call(episode.calls.close)
    threads[0].join()
    assert (answers[0].status_code, error_of(answers[0])["code"]) == (409, "episode_closed")
    assert talk.policy.cancelled == 1


# In whose name


def test_a_request_may_ask_in_the_name_of_a_seat(talk: Any) -> None:
    for headers in ({}, {"X-Nemorl-Seat": "solver/2"}, {"x-nemorl-seat": "judge"}):
        assert talk.post(CHAT, ASK, headers=headers).status_code == 200
    assert [asked.options.seat for asked in talk.policy.asked] == ["", "solver/2", "judge"]
    assert talk.episode.traffic.requests == 3
    answer = talk.post(CHAT, ASK, headers={"x-nemorl-seat": "x" * 101})
    assert answer.status_code == 400


def test_a_retry_of_another_seat_is_no_retry(talk: Any) -> None:
    first = talk.post(CHAT, ASK, headers={"x-nemorl-seat": "white"}).json()["id"]
    assert talk.post(CHAT, ASK, headers={"x-nemorl-seat": "white", **RETRY}).json()["id"] == first
    assert talk.post(CHAT, ASK, headers={"x-nemorl-seat": "black", **RETRY}).json()["id"] != first
