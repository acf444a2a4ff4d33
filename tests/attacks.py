"""What strangers do to a server without knowing its key, from as many connections as they can get."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

CONNECTIONS = 600
HALF = b"GET / HTTP/1.1\r\nHost: here\r\n"
WHOLE = HALF + b"\r\n"
BODY = b"POST /v1/chat/completions HTTP/1.1\r\nHost: here\r\nContent-Length: 1000\r\n\r\n{"
AT_ONCE = struct.pack("ii", 1, 0)
"""A connection that is closed is cut."""

Address = tuple[str, int]


class Crowd:
    """Connections that are held, and made anew when they are closed from the other side."""

    def __init__(self, address: Address, first: bytes, then: bytes) -> None:
        self.address, self.first, self.then = address, first, then
        self.held: list[socket.socket] = []
        self.closed = 0

    def round(self) -> None:
        """Each connection says something, or is replaced."""
        kept = []
        for one in self.held:
            try:
                while one.recv(65_536):
                    pass
            except BlockingIOError:
                with suppress(OSError):
                    one.send(self.then)
                kept.append(one)
                continue
            except OSError:
                pass
            one.close()
            self.closed += 1
        self.held = kept
        while len(self.held) < CONNECTIONS:
            one = socket.socket()
            one.settimeout(2)
            self.held.append(one)
            with suppress(OSError):
                one.connect(self.address)
                one.send(self.first)
            one.setblocking(False)

    def end(self) -> None:
        for one in self.held:
            one.close()


class Storm:
    """Connections that are closed as soon as they are made: half of them cut, some with nonsense."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self.closed = 0

    def round(self) -> None:
        for number in range(CONNECTIONS):
            with socket.socket() as one, suppress(OSError):
                one.settimeout(2)
                if number % 2:
                    one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, AT_ONCE)
                one.connect(self.address)
                if number % 4 > 1:
                    one.send(b"\x16\x03\x01\r\n\r\n" * 3)
            self.closed += 1

    def end(self) -> None:
        pass


ATTACKS: dict[str, Callable[[Address], Crowd | Storm]] = {
    "half-open": lambda address: Crowd(address, HALF, b""),
    "nothing": lambda address: Crowd(address, b"", b""),
    "slow header": lambda address: Crowd(address, HALF, b"x"),
    "slow body": lambda address: Crowd(address, BODY, b" "),
    "kept alive": lambda address: Crowd(address, WHOLE, b""),
    "storm": Storm,
}


@contextmanager
def under(attack: str, address: Address) -> Iterator[Crowd | Storm]:
    """The attack goes on for as long as the block, and all its connections have been there when it begins."""
    crowd = ATTACKS[attack](address)
    crowd.round()
    is_over = threading.Event()

    def go_on() -> None:
        while not is_over.wait(0.02):
            crowd.round()

    thread = threading.Thread(target=go_on)
    thread.start()
    try:
        yield crowd
    finally:
        is_over.set()
        thread.join()
        crowd.end()
