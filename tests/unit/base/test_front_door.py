"""A door lets in as many as it may, for as long as they may take, and those that are being answered stay."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from nemorl.resources.ports import listening_socket
from nemorl_trust.front_door import PER_PEER, SHARE, FrontDoor, Limits
from nemorl_trust.listening import allow_more_open_files

SOON_S = 0.1
NEVER_S = 1e6


class Echo(asyncio.Protocol):
    """``ask`` begins a request without a body, ``send`` one with; ``all`` is its end, ``done`` that of the answer."""

    def __init__(self, door: FrontDoor) -> None:
        self._door = door
        self._asked: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if data in (b"ask", b"send"):
            self._asked = self._door.asked(self._transport.get_extra_info("peername"), has_body=data == b"send")
            self._is_complete = self._asked.__enter__()
        elif data == b"all":
            self._is_complete()
        elif data == b"done":
            self._asked.__exit__(None, None, None)
        self._transport.write(data)


@contextmanager
def opened(limits: Limits) -> Iterator[tuple[str, int]]:
    listening = listening_socket("a test", "127.0.0.1", 0, waiting=100)
    door = FrontDoor("a test", limits)
    door.open(listening, lambda: Echo(door))
    try:
        yield listening.getsockname()
    finally:
        door.close()
        door.close()  # twice is harmless
        listening.close()


class Client:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def at(cls, place: tuple[str, int], *said: bytes, source: str = "127.0.0.1") -> Client:
        client = cls(*await asyncio.open_connection(*place, local_addr=(source, 0)))
        for word in said:
            await client.say(word)
        return client

    async def say(self, word: bytes) -> None:
        self._writer.write(word)
        assert await self._reader.readexactly(len(word)) == word

    async def rest(self) -> bytes:
        """What comes until the other side closes."""
        try:
            return await self._reader.read()
        except ConnectionError:
            return b""


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 60))


@pytest.mark.parametrize(
    ("said", "limits"),
    [
        ([], Limits(header_s=SOON_S, body_s=NEVER_S, idle_s=NEVER_S)),
        ([b"part"], Limits(header_s=SOON_S, body_s=NEVER_S, idle_s=NEVER_S)),
        ([b"send", b"part"], Limits(header_s=NEVER_S, body_s=SOON_S, idle_s=NEVER_S)),
        ([b"ask", b"done"], Limits(header_s=NEVER_S, body_s=NEVER_S, idle_s=SOON_S)),
        ([b"send", b"all", b"done", b"part"], Limits(header_s=NEVER_S, body_s=NEVER_S, idle_s=SOON_S)),
    ],
)
def test_who_does_not_finish_is_closed(said: list[bytes], limits: Limits) -> None:
    async def test() -> None:
        with opened(limits) as place:
            assert await (await Client.at(place, *said)).rest() == b""

    run(test)


@pytest.mark.parametrize("said", [[b"ask"], [b"send", b"all"]])
def test_who_waits_for_an_answer_is_not(said: list[bytes]) -> None:
    async def test() -> None:
        with opened(Limits(header_s=2 * SOON_S, body_s=SOON_S, idle_s=SOON_S)) as place:
            client = await Client.at(place, *said)
            assert await (await Client.at(place)).rest() == b""  # came later, and its time is over
            await client.say(b"done")

    run(test)


def test_those_that_ask_nothing_make_room_and_others_get_a_503() -> None:
    async def test() -> None:
        most = 8
        with opened(Limits(most=most)) as place:
            silent = [await Client.at(place, b"x") for _ in range(int(most * PER_PEER))]
            asking = [await Client.at(place, b"ask") for _ in silent]
            assert [await client.rest() for client in silent] == [b""] * len(silent)
            assert (await (await Client.at(place)).rest()).startswith(b"HTTP/1.1 503 ")
            others = [await Client.at(place, b"ask", source="127.0.0.2") for _ in range(most - len(asking))]
            assert (await (await Client.at(place, source="127.0.0.2")).rest()).startswith(b"HTTP/1.1 503 ")
            for client in [*asking, *others]:
                await client.say(b"done")
            await Client.at(place, b"ask")

    run(test)


def test_those_that_ask_again_and_again_make_room_between() -> None:
    async def test() -> None:
        with opened(Limits(most=4)) as place:
            regulars = [await Client.at(place, b"ask", b"done") for _ in range(3)]

            async def go_on(client: Client) -> None:
                while True:
                    await client.say(b"ask")
                    await client.say(b"done")

            asking = [asyncio.create_task(go_on(client)) for client in regulars]
            newcomer = await Client.at(place)
            await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)  # one was closed
            await newcomer.say(b"ask")
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)

    run(test)


def test_a_server_has_part_of_what_the_process_may_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1000, 4000))
    assert Limits().in_all() == 1000 // SHARE
    assert Limits(most=10).in_all() == 10
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert Limits().in_all() == Limits().most


@pytest.mark.parametrize(
    ("soft", "hard", "after"), [(1024, 4096, 4096), (1024, 1 << 30, 65_536), (1 << 20, 1 << 30, None)]
)
def test_the_soft_limit_is_raised(monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, after: int | None) -> None:
    said = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: said.append(limits))
    allow_more_open_files()
    assert said == ([] if after is None else [(after, hard)])


def test_its_socket_is_the_callers() -> None:
    async def test() -> None:
        listening = listening_socket("a test", "127.0.0.1", 0, waiting=1)
        door = FrontDoor("a test", Limits())
        door.open(listening, lambda: Echo(door))
        door.close()
        assert listening.fileno() >= 0
        listening.close()

    run(test)
