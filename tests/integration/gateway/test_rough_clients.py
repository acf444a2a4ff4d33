"""Clients as they also are: slow, gone, too loud, many at once. No answer goes astray, and nothing stays behind."""

from __future__ import annotations

import asyncio
import gc
import json
import random
import socket
import time
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest
from nemorl_agents.gateway.access import Access
from nemorl_agents.gateway.gateway import Gateway, GatewayOptions
from nemorl_rl.agents.contract import ChatReply
from scripted_policy import Asked, ScriptedPolicy, saying

PATIENCE_S = 20.0
ASK = {"model": "policy", "messages": [{"role": "user", "content": "1+2?"}]}


def connected(gateway: Gateway) -> socket.socket:
    host, port = gateway.address.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=PATIENCE_S)


def head(access: Access, length: int, path: str = "/v1/chat/completions") -> bytes:
    place = "/" + access.base_url.split("/", 3)[3] + path
    lines = [
        f"POST {place} HTTP/1.1",
        "host: here",
        f"authorization: Bearer {access.api_key}",
        f"content-length: {length}",
    ]
    return "\r\n".join([*lines, "", ""]).encode()


def until(true: Callable[[], bool]) -> None:
    """Wait for something that must come."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def answer_of(raw: socket.socket, ending: bytes) -> bytes:
    """What comes until these bytes have come."""
    found = b""
    while ending not in found:
        part = raw.recv(65536)
        assert part, found
        found += part
    return found


async def never() -> ChatReply:
    await asyncio.Event().wait()
    raise AssertionError


def test_a_body_that_drips_is_given_up(gateway: Gateway) -> None:
    access = gateway.open(ScriptedPolicy())
    with connected(gateway) as raw:
        raw.sendall(head(access, 100) + b'{"mod')  # body_timeout_s is 1
        answer = answer_of(raw, b'"request_timeout"}}')
        assert answer.startswith(b"HTTP/1.1 408")
        assert b"the body did not arrive in 1 s" in answer
        assert raw.recv(65536) == b""  # the connection is closed
    assert gateway.close(access).refused == 1


def test_ten_megabytes_get_an_answer_and_not_a_broken_pipe(gateway: Gateway) -> None:
    access = gateway.open(ScriptedPolicy())
    messages = [{"role": "user", "content": "x" * 1_000_000}] * 10
    with httpx.Client(base_url=access.base_url, headers={"authorization": f"Bearer {access.api_key}"}) as client:
        answer = client.post("/v1/chat/completions", json={**ASK, "messages": messages}, timeout=PATIENCE_S)
        assert answer.status_code == 413
        assert answer.json()["error"]["code"] == "request_too_large"


def test_a_client_that_hangs_up_cancels_its_call_and_a_body_cut_short_makes_none(gateway: Gateway) -> None:
    for stream in (False, True):
        policy = ScriptedPolicy(lambda asked: never())
        access = gateway.open(policy)
        body = json.dumps({**ASK, "stream": stream}).encode()
        with connected(gateway) as raw:
            raw.sendall(head(access, len(body)) + body)
            until(lambda policy=policy: len(policy.asked) == 1)  # type: ignore[misc]
            if stream:  # it begins after 0.2 s, with a comment
                assert answer_of(raw, b": the policy is at work").startswith(b"HTTP/1.1 200")
        until(lambda policy=policy: policy.cancelled == 1)  # type: ignore[misc]
        with connected(gateway) as raw:
            raw.sendall(head(access, len(body)) + body[:10])
        until(lambda access=access: gateway.traffic(access).disconnects == 2)  # type: ignore[misc]
        assert gateway.close(access).requests == 2
        assert len(policy.asked) == 1


def test_closing_an_episode_ends_its_requests_and_its_key(gateway: Gateway) -> None:
    policy = ScriptedPolicy(lambda asked: never())
    access = gateway.open(policy)
    body = json.dumps(ASK).encode()
    with connected(gateway) as raw:
        raw.sendall(head(access, len(body)) + body)
        until(lambda: len(policy.asked) == 1)
        gateway.close(access)
        assert answer_of(raw, b'"episode_closed"}}').startswith(b"HTTP/1.1 409")
        raw.sendall(head(access, len(body)) + body)
        assert answer_of(raw, b'"episode_closed"}}').startswith(b"HTTP/1.1 409")
    assert (len(policy.asked), policy.cancelled) == (1, 1)
    assert gateway.close(access).requests == 0


@pytest.mark.full
def test_two_hundred_episodes_with_clients_that_leave_never_mix_and_leave_nothing() -> None:
    """Each episode's policy answers with its own name; a third of the requests are abandoned at random."""
    chance = random.Random(5)

    async def play(gateway: Gateway, client: Any, number: int) -> None:
        async def say(asked: Asked) -> ChatReply:
            await asyncio.sleep(chance.random() * 0.02)
            return saying(f"{number}:{asked.messages[-1]['content']}")

        access = gateway.open(ScriptedPolicy(say, episode_id=f"episode {number}"))
        address = {"base_url": access.openai_base_url, "api_key": access.api_key}
        agent = openai.AsyncOpenAI(
            **address, max_retries=0, timeout=300, http_client=client
        )  # the SDK gives a connection 5 s

        async def ask(turn: int) -> None:
            asked = {"model": "policy", "messages": [{"role": "user", "content": str(turn)}], "stream": turn % 2 == 1}
            work = asyncio.create_task(said(agent, asked))
            if turn % 3 == 2:
                await asyncio.sleep(chance.random() * 0.02)
                work.cancel()
                await asyncio.wait([work])
                if work.cancelled():
                    return
            assert await work == f"{number}:{turn}"

        await asyncio.gather(*(ask(turn) for turn in range(6)))
        traffic = gateway.close(access)
        assert traffic.failures == traffic.refused == 0

    async def play_all(gateway: Gateway) -> None:
        async with openai.DefaultAsyncHttpxClient() as client:
            for start in range(0, 200, 50):
                await asyncio.gather(*(play(gateway, client, number) for number in range(start, start + 50)))

    before = alive()
    with Gateway(GatewayOptions()) as gateway:
        asyncio.run(play_all(gateway))
        until(lambda: alive() <= before)


def alive() -> int:
    """Episodes that something still holds."""
    from nemorl_agents.gateway.episodes import OpenEpisode

    gc.collect()
    return sum(type(one) is OpenEpisode for one in gc.get_objects())


async def said(agent: openai.AsyncOpenAI, asked: dict[str, Any]) -> str:
    answer = await agent.chat.completions.create(**asked)
    if not asked["stream"]:
        return str(answer.choices[0].message.content)
    return "".join([chunk.choices[0].delta.content or "" async for chunk in answer])
