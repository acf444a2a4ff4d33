"""FrontDoor: accepts the connections of an asyncio server, and keeps strangers from using up the process's descriptors.

``loop.create_server`` takes whoever comes: each connection holds a descriptor from before the first byte, a server
learns of it when its request's header is complete, and where none are left asyncio logs a traceback per attempt. Here
a connection is let in, bounded in number and in time, until it has asked something; the server says when that is
(:meth:`FrontDoor.asked`). Where there are too many, the one that has had longest to ask and did not makes room. Where
all of them are being answered, the next one gets 503.

Imports the standard library only: it is also loaded from its file, by interpreters that do not have nemorl.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import resource
import socket
import ssl
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

log = logging.getLogger(__name__)

PER_PASS = 8
"""Connections that are accepted before those that are there are read."""
GRACE_S = 0.5
"""The least time that a connection has to ask, or to send what it asks: so long, others wait where the system keeps
them, unaccepted. One that was answered may be closed at any time, as HTTP has it."""
SHARE = 4
"""One server has at most this part of the descriptors that the process may open: the rest is for files, and others."""
PER_PEER = 0.75
"""Of these, one address at most so much."""
PAUSE_S = 0.5
"""Until the next attempt to accept where the system lets no descriptor be opened."""
SAY_EVERY_S = 60.0
"""At most one line about each kind of trouble in this time."""
GONE = (errno.ECONNABORTED, errno.EPROTO, errno.EPERM)
"""Accepting says so of a connection that was given up, or that a firewall forbids: the next one is fine."""
BUSY = b"too many connections\n"
REFUSAL = (
    b"HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\nretry-after: 1\r\n"
    b"content-type: text/plain\r\ncontent-length: %d\r\n\r\n%b" % (len(BUSY), BUSY)
)
Peer = tuple[str, int]
"""Address and port, as servers name the other end."""


@dataclass(frozen=True)
class Limits:
    """How many connections a server has at most, and how long they may take."""

    most: int = 16_384
    """Connections at a time, where the process's limit of open files allows as many (:data:`SHARE`)."""
    header_s: float = 20.0
    """Seconds from a connection to its first request's complete header, TLS included."""
    body_s: float = 60.0
    """Seconds from a request's header to the end of its body."""
    idle_s: float = 125.0
    """Seconds from one request's answer to the next one's header: longer than the server itself keeps connections."""

    def in_all(self) -> int:
        """Connections at a time, under the process's limit of open files as it is now."""
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return self.most if soft == resource.RLIM_INFINITY else max(1, min(self.most, soft // SHARE))


class FrontDoor:
    """Accepts connections for one server. It lives on one event loop, as the server does.

    Example:
        >>> door = FrontDoor("the gateway", Limits(most=64))  # doctest: +SKIP
        >>> door.open(listening, make_protocol)
    """

    def __init__(self, who: str, limits: Limits) -> None:
        """
        Args:
            who: Listens, for the log.
            limits: Of its connections.
        """
        self.who, self.limits = who, limits
        self._most = limits.in_all()
        self._per_peer = max(1, int(PER_PEER * self._most))
        self._visits: dict[Peer, _Visit] = {}
        self._silent: dict[str, dict[_Visit, None]] = defaultdict(dict)
        """By address: connections that ask nothing yet, or do not finish it; first who has been silent longest"""
        self._count: Counter[str] = Counter()
        """Connections by address"""
        self._news = _News(who)
        self._listening: socket.socket | None = None
        self._next: tuple[socket.socket, Peer] | None = None
        """Accepted, and waits until there is room"""
        self._pause: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def open(
        self, listening: socket.socket, protocol: Callable[[], asyncio.Protocol], tls: ssl.SSLContext | None = None
    ) -> None:
        """Accept from now on, on the running event loop.

        Args:
            listening: Stays the caller's to close.
            protocol: Made for each connection.
            tls: Connections are encrypted.
        """
        self._loop = asyncio.get_running_loop()
        self._protocol, self._tls = protocol, tls
        listening.setblocking(False)
        self._listening = listening
        self._loop.add_reader(listening, self._accept)

    def close(self) -> None:
        """Accept nobody any more. Connections that are there stay with the server. Twice is harmless."""
        if self._listening is None:
            return
        self._loop.remove_reader(self._listening)
        self._listening = None
        if self._pause is not None:
            self._pause.cancel()
        if self._next is not None:
            self._next[0].close()
            self._next = None
        for task in self._tasks:
            task.cancel()
        self._news.tell_rest()

    async def wait_closed(self) -> None:
        """Nothing is left to wait for."""

    # What the server says

    @contextmanager
    def asked(self, peer: Peer | None, *, has_body: bool) -> Iterator[Callable[[], None]]:
        """A request is being answered, its header complete. Gives what is to be called when its body is, too."""
        visit = self._visits.get(peer[:2]) if peer else None  # type: ignore[call-overload]
        if visit is None:  # it has gone already
            yield lambda: None
            return
        if has_body:
            self._listen_to(visit, self.limits.body_s)
        else:
            self._trust(visit)
        try:
            yield lambda: self._trust(visit)
        finally:
            self._listen_to(visit, self.limits.idle_s, grace=visit.is_sending())

    # Accepting

    def _accept(self) -> None:
        assert self._listening is not None
        for _ in range(PER_PASS):
            try:
                if self._next is None:
                    connection, address = self._listening.accept()
                    connection.setblocking(False)
                    self._next = connection, address[:2]
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                if error.errno in GONE:
                    continue
                self._news.hear(f"cannot accept connections ({error.strerror}); it tries again")
                self._make_room(None, at_once=True)
                self._rest(PAUSE_S)
                return
            has_room = self._has_room(self._next[1][0])
            if has_room is None:
                self._rest(GRACE_S / 10)
                return
            (self._receive if has_room else self._turn_away)(*self._next)
            self._next = None

    def _rest(self, seconds: float) -> None:
        """Accept nobody for so long."""
        assert self._listening is not None
        self._loop.remove_reader(self._listening)
        self._pause = self._loop.call_later(seconds, self._go_on)

    def _go_on(self) -> None:
        if self._listening is not None:
            self._loop.add_reader(self._listening, self._accept)
            self._accept()

    def _has_room(self, host: str) -> bool | None:
        """There is room for a connection of this address, or was made; unset: there will be."""
        has_room: bool | None = True
        if self._count[host] >= self._per_peer:
            has_room = self._make_room(host)
        if has_room and len(self._visits) >= self._most:
            has_room = self._make_room(None)
        return has_room

    def _make_room(self, host: str | None, *, at_once: bool = False) -> bool | None:
        """Close the connection that has been silent longest, of this address or of that with most.

        Returns:
            There was one. Unset: it still has time.
        """
        if host is None:
            host = max(self._silent, key=lambda each: len(self._silent[each]), default="")
        oldest = next(iter(self._silent.get(host, ())), None)
        if oldest is None:
            return False
        if self._loop.time() < oldest.grace_until_s and not at_once:
            return None
        self._news.hear(f"has too many connections ({len(self._visits)}): it closes those that ask nothing")
        self._end(oldest)
        return True

    def _receive(self, connection: socket.socket, peer: Peer) -> None:
        if peer in self._visits:  # the same port again, before its earlier end was noticed
            self._end(self._visits[peer])
        visit = _Visit(self, self._protocol, peer)
        self._visits[peer] = visit
        self._count[peer[0]] += 1
        self._listen_to(visit, self.limits.header_s)
        visit.task = self._loop.create_task(self._welcome(visit, connection))
        self._tasks.add(visit.task)
        visit.task.add_done_callback(lambda task: self._welcomed(visit, connection, task))

    def _turn_away(self, connection: socket.socket, peer: Peer) -> None:
        self._news.hear(f"is answering as many requests as it can ({len(self._visits)}): it refuses connections")
        with connection, suppress(OSError):
            if self._tls is None:
                connection.send(REFUSAL)
                connection.shutdown(socket.SHUT_WR)
            connection.recv(65_536)  # what stays unread would cancel the answer

    async def _welcome(self, visit: _Visit, connection: socket.socket) -> None:
        timeout_s = None if self._tls is None else self.limits.header_s
        with suppress(OSError):  # it has gone, or does not speak TLS
            await self._loop.connect_accepted_socket(
                lambda: visit, connection, ssl=self._tls, ssl_handshake_timeout=timeout_s
            )

    def _welcomed(self, visit: _Visit, connection: socket.socket, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if visit.transport is None:
            connection.close()
            self.forget(visit)

    # Connections that are there

    def _listen_to(self, visit: _Visit, seconds: float, *, grace: bool = True) -> None:
        """A connection is to say something, within so many seconds; earlier only if others need the room."""
        self._trust(visit)
        if self._visits.get(visit.peer) is visit:
            self._silent[visit.peer[0]][visit] = None
            visit.grace_until_s = self._loop.time() + GRACE_S if grace else 0.0
            visit.deadline = self._loop.call_later(seconds, self._end, visit)

    def _trust(self, visit: _Visit) -> None:
        """A connection waits for the server now."""
        if visit.deadline is not None:
            visit.deadline.cancel()
            visit.deadline = None
        of_host = self._silent.get(visit.peer[0], {})
        of_host.pop(visit, None)
        if not of_host:
            self._silent.pop(visit.peer[0], None)

    def _end(self, visit: _Visit) -> None:
        self.forget(visit)
        if visit.transport is not None:
            visit.transport.abort()
        elif visit.task is not None:
            visit.task.cancel()

    def forget(self, visit: _Visit) -> None:
        """A connection has ended."""
        if self._visits.get(visit.peer) is not visit:
            return
        self._trust(visit)
        del self._visits[visit.peer]
        self._count[visit.peer[0]] -= 1
        if not self._count[visit.peer[0]]:
            del self._count[visit.peer[0]]


class _Visit(asyncio.Protocol):
    """One connection: passes everything on to the server's own protocol."""

    def __init__(self, door: FrontDoor, protocol: Callable[[], asyncio.Protocol], peer: Peer) -> None:
        self._door, self._make = door, protocol
        self.peer = peer
        self.transport: asyncio.Transport | None = None
        self.task: asyncio.Task[None] | None = None
        self.deadline: asyncio.TimerHandle | None = None
        self.grace_until_s = 0.0

    def is_sending(self) -> bool:
        """Part of an answer has still to be sent."""
        return self.transport is not None and self.transport.get_write_buffer_size() > 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self._inner = self._make()
        self._inner.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        return self._inner.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self._door.forget(self)
        self._inner.connection_lost(exc)

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()


class _News:
    """Lines of the log about what happens again and again: the first time at once, then how often it was."""

    def __init__(self, who: str) -> None:
        self._who = who
        self._times: Counter[str] = Counter()
        self._said_s: dict[str, float] = {}

    def hear(self, what: str) -> None:
        kind = what.partition("(")[0]
        self._times[kind] += 1
        now_s = asyncio.get_running_loop().time()
        if now_s - self._said_s.get(kind, -SAY_EVERY_S) >= SAY_EVERY_S:
            self._said_s[kind] = now_s
            self._say(what, self._times.pop(kind))

    def tell_rest(self) -> None:
        for kind, times in self._times.items():
            self._say(kind, times)
        self._times.clear()

    def _say(self, what: str, times: int) -> None:
        log.warning("%s %s%s", self._who, what, f" ({times} times)" if times > 1 else "")
