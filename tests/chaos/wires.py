"""A way between a run and a server that can be cut."""

from __future__ import annotations

import socket
import struct
import threading
import time
from contextlib import suppress
from typing import Self

POLL_S = 0.02
ABRUPTLY = struct.pack("ii", 1, 0)
"""Linger for no time: closing sends a reset."""


def tell(control: str, words: str) -> None:
    """Send words to what has this ``control``, a wire or a cluster of nodes."""
    host, _, port = control.rpartition(":")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as told:
        told.sendto(words.encode(), (host, int(port)))


class Wire:
    """What comes in at ``port`` goes to a server on this machine, and its answers come back.

    In a ``silence`` nothing gets through and nobody is told, as between the parts of a network: senders think that all
    is well until the acknowledgement fails to come. A ``reset`` breaks all connections, and every new one. Both are
    told by a datagram to ``control``, with seconds: ``silence 0.5``.
    """

    def __init__(self, server_port: int) -> None:
        self._server = ("127.0.0.1", server_port)
        self._listening = socket.create_server(("127.0.0.1", 0), backlog=128)
        self._told = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._told.bind(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]
        self.control = f"127.0.0.1:{self._told.getsockname()[1]}"
        self._silent_until = self._refuses_until = 0.0
        self._open: set[socket.socket] = set()
        for loop in (self._accept, self._listen):
            threading.Thread(target=loop, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for one in (self._listening, self._told):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        self._break_all()

    def mend(self) -> None:
        self._silent_until = self._refuses_until = 0.0

    def _listen(self) -> None:
        with suppress(OSError):
            while words := self._told.recv(64).decode().split():
                until = time.monotonic() + float(words[1])
                if words[0] == "silence":
                    self._silent_until = until
                else:
                    self._refuses_until = until
                    self._break_all()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listening.accept()
                threading.Thread(target=self._join, args=(client,), daemon=True).start()

    def _join(self, client: socket.socket) -> None:
        """Both ways of one connection, until either side ends it."""
        self._wait()
        try:
            if time.monotonic() < self._refuses_until:
                raise ConnectionRefusedError
            server = socket.create_connection(self._server)
        except OSError:
            _close(client)
            return
        pair = {client, server}
        self._open |= pair
        back = threading.Thread(target=self._pump, args=(server, client), daemon=True)
        back.start()
        self._pump(client, server)
        back.join()
        self._open -= pair
        for side in pair:
            side.close()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                self._wait()
                sink.sendall(data)
        for side in (source, sink):
            with suppress(OSError):
                side.shutdown(socket.SHUT_RDWR)

    @property
    def is_silent(self) -> bool:
        return time.monotonic() < self._silent_until

    def _wait(self) -> None:
        while self.is_silent:
            time.sleep(POLL_S)

    def _break_all(self) -> None:
        for side in list(self._open):
            with suppress(OSError):
                side.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, ABRUPTLY)
                side.shutdown(socket.SHUT_RDWR)


def _close(side: socket.socket) -> None:
    with suppress(OSError):
        side.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, ABRUPTLY)
    side.close()
