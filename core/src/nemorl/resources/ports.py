"""Ports for servers that are about to start."""

from __future__ import annotations

import random
import socket
from contextlib import ExitStack
from pathlib import Path

from nemorl.errors import UsageError

FIRST = 15_000
EPHEMERAL = 32_768
"""Where Linux begins to give ports to whoever asks for any."""
ATTEMPTS = 200


def free_port() -> int:
    """A TCP port of this machine that nobody listens on, for somebody who will in a moment.

    It is below the range from which the system gives ports to clients and to servers that ask for any: none of these
    takes it meanwhile.
    """
    draw = random.SystemRandom()  # processes that were forked from one draw different ports
    for _ in range(ATTEMPTS):
        port = draw.randrange(FIRST, _first_ephemeral())
        if _is_free(port):
            return port
    with socket.socket() as server:
        server.bind(("", 0))
        given: int = server.getsockname()[1]
        return given


def _is_free(port: int) -> bool:
    with socket.socket() as server:
        try:
            server.bind(("", port))
        except OSError:
            return False
    return True


def _first_ephemeral() -> int:
    try:
        found = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return EPHEMERAL
    return found if found > FIRST else EPHEMERAL


def listening_socket(who: str, host: str, port: int, *, waiting: int) -> socket.socket:
    """A socket that takes connections from now on.

    Args:
        who: Listens there, for the error.
        host: An address of this machine, IPv4 or IPv6.
        port: 0 for a free one.
        waiting: Connections that may wait until they are taken.

    Raises:
        UsageError: The address is another machine's, or the port is taken.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with ExitStack() as undo:
        try:  # named: asyncio then sends at once
            listening = undo.enter_context(socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP))
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind((host, port))
            listening.listen(waiting)
        except (OSError, OverflowError, TypeError, ValueError) as error:  # a port beyond 65535, a host that is no name
            raise UsageError(
                f"{who} cannot listen on {host}, port {port}: {error}",
                fix="choose an address of this machine, and port 0 for a free one",
            ) from error
        undo.pop_all()
    return listening
