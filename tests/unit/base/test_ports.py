"""A port for a server that is about to start."""

from __future__ import annotations

import asyncio
import socket

import pytest
from nemorl.errors import UsageError
from nemorl.resources.ports import FIRST, _first_ephemeral, free_port, listening_socket
from recorded_messages import Raises


def test_a_free_port_is_nobodys_and_below_those_that_the_system_gives() -> None:
    found = {free_port() for _ in range(50)}
    assert len(found) > 40  # drawn, not counted: processes that start together draw different ones
    assert all(FIRST <= port < _first_ephemeral() for port in found)
    with socket.socket() as server:
        server.bind(("", next(iter(found))))
        server.listen()


def test_a_server_of_asyncio_sends_small_answers_at_once() -> None:
    """Else each answer in two parts waits 40 ms for the client to acknowledge the first: Nagle's algorithm."""

    async def scene() -> int:
        found: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        def connected(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            made = writer.get_extra_info("socket")
            found.set_result(made.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        listening = listening_socket("a test", "127.0.0.1", 0, waiting=1)
        port = listening.getsockname()[1]
        async with await asyncio.start_server(connected, sock=listening):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.close()
            return await found

    assert asyncio.run(scene()) == 1


@pytest.mark.parametrize(("host", "port"), [("127.0.0.1", 70_000), ("a\0b", 0), ("\u2603" * 70, 0), ("192.0.2.1", 0)])
def test_an_address_that_cannot_be_listened_on_is_one_error(host: str, port: int, raises: Raises) -> None:
    with raises(UsageError, port):
        listening_socket("the server", host, port, waiting=1)
