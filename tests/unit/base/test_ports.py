"""A port for a server that is about to start."""

from __future__ import annotations

import socket

from nemorl.resources.ports import FIRST, _first_ephemeral, free_port


def test_a_free_port_is_nobodys_and_below_those_that_the_system_gives() -> None:
    found = {free_port() for _ in range(50)}
    assert len(found) > 40  # drawn, not counted: processes that start together draw different ones
    assert all(FIRST <= port < _first_ephemeral() for port in found)
    with socket.socket() as server:
        server.bind(("", next(iter(found))))
        server.listen()
