"""The server's life: where it listens, who may come in, and its end while answers are on their way."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import httpx
import pytest
from nemorl.errors import UsageError
from nemorl_agents.gateway.gateway import Gateway, GatewayOptions
from nemorl_rl.agents.contract import ChatReply
from recorded_messages import Raises
from scripted_policy import ScriptedPolicy, saying

ASK = {"model": "policy", "messages": [{"role": "user", "content": "?"}]}
GATEWAY_THREAD = "nemorl-gateway"


def ask(base_url: str, key: str) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"}
    return httpx.post(f"{base_url}/v1/chat/completions", json=ASK, headers=headers, timeout=30, trust_env=False)


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == GATEWAY_THREAD]


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_it_answers_where_it_says_and_leaves_no_thread(host: str) -> None:
    before = threads()
    try:
        gateway = Gateway(GatewayOptions(host=host))
    except UsageError:
        pytest.skip(f"this machine has no {host}")
    with gateway:
        access = gateway.open(ScriptedPolicy(lambda asked: saying("4")))
        assert ask(access.base_url, access.api_key).json()["choices"][0]["message"]["content"] == "4"
        assert access.variables()["OPENAI_BASE_URL"] == f"{access.base_url}/v1"
        assert access.api_key not in repr(access)
    gateway.shutdown()  # twice is harmless
    assert threads() == before


def test_traffic_of_all_episodes_is_told_at_the_end_and_that_of_the_last_ones_alone_is_held(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[dict[str, Any]] = []
    monkeypatch.setattr("nemorl_agents.gateway.gateway.record", lambda _, facts: told.append(facts))
    monkeypatch.setattr("nemorl_agents.gateway.gateway.LATEST", 2)
    with Gateway() as gateway:
        for number in range(5):
            access = gateway.open(ScriptedPolicy())
            assert ask(access.base_url, access.api_key).status_code == 200
            assert ask(access.base_url, "of another").status_code == 401  # it is nobody's request
            assert gateway.close(access).requests == 1
            assert len(gateway._traffic) <= min(number + 1, 2)
    [facts] = told
    assert {name: facts[name] for name in ("episodes", "requests", "refused")} == {
        "episodes": 5,
        "requests": 5,
        "refused": 0,
    }


def test_a_policy_at_the_root_is_reached_with_its_key_alone() -> None:
    with Gateway(GatewayOptions(models=("policy",))) as gateway:
        access = gateway.open_at_root(ScriptedPolicy(), key="of my own")
        assert access.base_url == gateway.address
        assert ask(access.base_url, "of my own").status_code == 200
        assert ask(access.base_url, "of another").status_code == 401
        episode = gateway.open(ScriptedPolicy())
        assert ask(access.base_url, episode.api_key).status_code == 401


def test_its_end_is_told_to_who_waits() -> None:
    asked = threading.Event()

    async def say() -> ChatReply:
        asked.set()
        await asyncio.Event().wait()
        raise AssertionError

    with Gateway() as gateway:
        access = gateway.open(ScriptedPolicy(lambda _: say()))
        answers: list[httpx.Response] = []
        client = threading.Thread(target=lambda: answers.append(ask(access.base_url, access.api_key)))
        client.start()
        assert asked.wait(20)
    client.join()
    assert [(answer.status_code, answer.json()["error"]["code"]) for answer in answers] == [(409, "episode_closed")]


def test_options_with_which_nobody_is_answered_are_refused(raises: Raises) -> None:
    with raises(UsageError, "models"):
        Gateway(GatewayOptions(models=()))
    with raises(UsageError, "203.0.113.7"):
        Gateway(GatewayOptions(host="203.0.113.7", plaintext=True))
