"""The transport ``delta_socket``: changes of the weights over TCP, between any nodes.

The sender listens on a port of its own as long as it lives. An engine connects for each version, names the one that it
has, and is answered with what has changed since, or with the whole weights; several are served at the same time, each
by a thread, and one that comes late or was replaced is served like any other. The training thread waits for nobody.

Whoever connects must show the token that the payload carries. Nothing is encrypted: for networks that are trusted.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, BinaryIO

from nemorl.errors import BackendError, WeightsLostError
from nemorl.resources.ports import listening_socket
from nemorl.weights import Export

from nemorl_rl.transports.broadcast import own_address
from nemorl_rl.transports.delta.counts import CountedPayload, Counter

if TYPE_CHECKING:
    from torch import Tensor

    from nemorl_rl.transports.delta.bases import Bases

MOST_REQUEST_BYTES = 2**16
BUFFER_BYTES = 2**20
"""Read from a connection at once"""
POLL_S = 0.2
"""How often the listening thread looks whether it is to end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SocketPayload(CountedPayload):
    """Where to ask for one version."""

    sender: str
    """Its name in all processes: no other sender has or had it"""
    number: int
    """Of the version, among the sender's"""
    address: str
    port: int
    token: str = field(repr=False)
    deadline_s: float
    """Longest wait of either side for the other's next bytes"""


class DeltaSocket:
    """Either end (see ``WeightTransport``)."""

    def __init__(self, deadline_s: float, bases: Bases | None = None) -> None:
        """
        Args:
            deadline_s: Longest wait of either side for the other's next bytes.
            bases: What was fetched before. Unset: by this process.
        """
        self._deadline_s, self._bases = deadline_s, bases
        self._server: _Server | None = None

    def publish(self, export: Export) -> SocketPayload:
        if self._server is None:
            self._server = _Server(self._deadline_s)
        return self._server.publish(export)

    def fetch(self, payload: SocketPayload) -> Iterator[Mapping[str, Tensor]]:
        from nemorl_rl.transports.delta.bases import OF_PROCESS

        bases = OF_PROCESS if self._bases is None else self._bases
        return bases.fetch(payload.sender, payload.number, partial(_asked, payload))

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None


class _Server:
    """The sender's side."""

    def __init__(self, deadline_s: float) -> None:
        from nemorl_rl.transports.delta.versions import KeptVersions

        self._kept, self._counter, self._deadline_s = KeptVersions(), Counter(), deadline_s
        self._token, self._sender = secrets.token_hex(16), secrets.token_hex(8)
        self._address = own_address()
        self._listening = listening_socket("the sender of weights", self._address, 0, waiting=128)
        self._listening.settimeout(POLL_S)
        self._is_open = True
        self._thread = threading.Thread(target=self._listen, name="nemorl-delta-socket", daemon=True)
        self._thread.start()

    def publish(self, export: Export) -> SocketPayload:
        number = self._kept.publish(export)
        return SocketPayload(
            counts=self._counter.counts,
            sender=self._sender,
            number=number,
            address=self._address,
            port=self._listening.getsockname()[1],
            token=self._token,
            deadline_s=self._deadline_s,
        )

    def close(self) -> None:
        self._is_open = False
        self._thread.join()
        self._listening.close()

    def _listen(self) -> None:
        while self._is_open:
            try:
                connection, _ = self._listening.accept()
            except TimeoutError:  # nobody came
                continue
            except OSError:  # there are no more files to be had, say: whoever waits is served once there are
                time.sleep(POLL_S)
                continue
            threading.Thread(target=self._serve, args=(connection,), name="nemorl-delta-answer", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        from nemorl_rl.transports.delta.versions import GoneError

        with connection, suppress(OSError):  # whoever leaves comes again, or is lost, which others notice
            connection.settimeout(self._deadline_s)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            request = self._request(connection)
            if request is None:
                return
            try:
                message = self._kept.message(request["version"], request["base"])
            except GoneError as error:
                connection.sendall(json.dumps({"gone": str(error)}).encode() + b"\n")
                return
            self._counter.add(request["who"], message, request["why"])
            connection.sendall(b'{"gone": null}\n')
            with suppress(GoneError):  # in its midst: it ends early, the receiver asks again and is told
                for part in message.parts:
                    connection.sendall(part)

    def _request(self, connection: socket.socket) -> Any:
        """What a receiver wants; ``None`` of a stranger."""
        with connection.makefile("rb") as file:
            line = file.readline(MOST_REQUEST_BYTES)
        try:
            request = json.loads(line)
            is_known = hmac.compare_digest(request["token"].encode(), self._token.encode())
        except (ValueError, TypeError, KeyError, AttributeError):
            return None
        return request if is_known else None


@contextmanager
def _asked(payload: SocketPayload, base: int | None, why: str) -> Iterator[BinaryIO]:
    """See ``Ask``."""
    from nemorl_rl.transports.delta.changes import DamageError

    who = f"{socket.gethostname()}, process {os.getpid()}"
    request = {"token": payload.token, "version": payload.number, "base": base, "why": why, "who": who}
    try:
        connection = socket.create_connection((payload.address, payload.port), payload.deadline_s)
    except OSError as error:
        raise WeightsLostError(
            f"cannot ask for the trainer's weights at {payload.address}, port {payload.port}: {error}",
            fix="the trainer has ended, or a firewall keeps its node's ports from this one: open them, or unset "
            "cluster.weight_transport",
        ) from error
    with connection:
        try:
            connection.sendall(json.dumps(request).encode() + b"\n")
            file: BinaryIO = connection.makefile("rb", BUFFER_BYTES)  # type: ignore[assignment,unused-ignore]
            line = file.readline(MOST_REQUEST_BYTES)
            gone = json.loads(line)["gone"]
        except (OSError, ValueError) as error:
            raise DamageError(f"the trainer did not answer: {error}") from error
        if gone is not None:
            raise BackendError(gone, fix="fetch each version before the next but one is published")
        with file:
            yield file
