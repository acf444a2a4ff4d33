"""Calls of one episode: each is one piece of work that several requests may wait for, since clients repeat themselves.

A request that is marked as a retry, with the body of an earlier one, waits for that one's answer or is given it. A call
that nobody waits for any more is cancelled, and what it would have said is in no sample.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from nemorl_agents.gateway.errors import RequestError, closed_error

MOST_KEPT = 32
"""Answers that are kept for retries, the newest ones."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a request."""

    payload: Mapping[str, Any]
    """The whole answer as JSON."""
    events: Callable[[], Iterator[bytes]] | None = None
    """The same as server-sent events. ``None``: the API has no stream for it, or none was asked for."""


@dataclass(eq=False)
class Call:
    """Work under way, or done."""

    digest: bytes
    task: asyncio.Task[Answer]
    waiting: int = 0
    """Requests that want its answer."""

    def answer(self) -> Answer:
        """Its answer, once the task is done.

        Raises:
            RequestError: The episode was closed meanwhile.
        """
        if self.task.cancelled():
            raise closed_error()
        return self.task.result()


class Calls:
    """Used on the gateway's event loop only."""

    def __init__(self, limit: int) -> None:
        """
        Args:
            limit: Calls that run at the same time.
        """
        self._limit = limit
        self._running: set[Call] = set()
        self._kept: OrderedDict[bytes, Call] = OrderedDict()

    @property
    def running(self) -> int:
        return len(self._running)

    def earlier(self, digest: bytes) -> Call | None:
        """The newest call of a request with this digest, running or answered."""
        call = self._kept.get(digest)
        if call is not None:
            call.waiting += 1
        return call

    def begin(self, digest: bytes, work: Coroutine[Any, Any, Answer]) -> Call:
        """Start work that one request waits for.

        Raises:
            RequestError: As many run as may.
        """
        if len(self._running) >= self._limit:
            work.close()
            raise RequestError(
                429,
                f"this episode has {self._limit} requests on their way",
                fix="wait for some of them",
                code="too_many_requests",
                may_retry=True,
            )
        call = Call(digest, asyncio.create_task(work), waiting=1)
        self._running.add(call)
        self._kept[digest] = call
        self._kept.move_to_end(digest)
        while len(self._kept) > MOST_KEPT:
            self._kept.popitem(last=False)
        call.task.add_done_callback(lambda _: self._ended(call))
        return call

    def leave(self, call: Call) -> None:
        """A request has its answer, or does not want it any more."""
        call.waiting -= 1
        if not call.waiting and not call.task.done():
            self._forget(call)
            call.task.cancel()

    def close(self) -> None:
        """Cancel what runs, and forget what was answered."""
        for call in [*self._running]:
            call.task.cancel()
        self._kept.clear()

    def _ended(self, call: Call) -> None:
        self._running.discard(call)
        # What failed is tried anew. Asking for the exception also keeps asyncio from reporting that nobody did.
        if call.task.cancelled() or call.task.exception() is not None:
            self._forget(call)

    def _forget(self, call: Call) -> None:
        if self._kept.get(call.digest) is call:
            del self._kept[call.digest]


K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Newest(Generic[K, V]):
    """The newest entries of a table, at most so many."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._entries: OrderedDict[K, V] = OrderedDict()

    def get(self, key: K) -> V | None:
        return self._entries.get(key)

    def put(self, key: K, value: V) -> None:
        self._entries[key] = value
        self._entries.move_to_end(key)
        while len(self._entries) > self._most:
            self._entries.popitem(last=False)
