"""Futures: long polls, which an answer wakes up.

Clients ask again at once when they are told to try again, so that a poll without a wait would keep a processor busy.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict

HOLD_S = 30.0
"""A poll waits so long for its answer. Clients give up after 45 s."""


class Futures:
    """Polls that wait. It lives on one event loop; only ``done`` may be called from other threads."""

    def __init__(self, loop: asyncio.AbstractEventLoop, *, hold_s: float = HOLD_S) -> None:
        self._loop, self._hold_s = loop, hold_s
        self._polls: defaultdict[str, set[asyncio.Future[None]]] = defaultdict(set)

    def begin(self, request_id: str) -> asyncio.Future[None]:
        """A poll; to be begun before the answer is looked up, so that none slips through in between."""
        poll: asyncio.Future[None] = self._loop.create_future()
        self._polls[request_id].add(poll)
        return poll

    async def wait(self, poll: asyncio.Future[None]) -> bool:
        """Until the answer is there, or for the time that a poll may wait; returns whether it is there."""
        await asyncio.wait({poll}, timeout=self._hold_s)
        return poll.done()

    def end(self, request_id: str, poll: asyncio.Future[None]) -> None:
        """The poll is over."""
        self._polls[request_id].discard(poll)
        if not self._polls[request_id]:
            del self._polls[request_id]
        poll.cancel()

    def done(self, request_id: str) -> None:
        """An answer is there."""
        self._loop.call_soon_threadsafe(self._wake, request_id)

    def _wake(self, request_id: str) -> None:
        for poll in self._polls.get(request_id, ()):
            if not poll.done():
                poll.set_result(None)
