"""Futures: long polls, which an answer wakes up.

Clients ask again at once when they are told to try again, so that a poll without a wait would keep a processor busy.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict

from nemorl_agents.tinker.errors import ApiError, missing
from nemorl_agents.tinker.records import Answer, Records

HOLD_S = 30.0
"""A poll waits so long for its answer. Clients give up after 45 s."""


class Futures:
    """Answers, and the polls that wait for them. It lives on one event loop; only ``done`` may be called elsewhere."""

    def __init__(self, loop: asyncio.AbstractEventLoop, records: Records, *, hold_s: float = HOLD_S) -> None:
        self._loop, self._records, self._hold_s = loop, records, hold_s
        self._polls: defaultdict[str, set[asyncio.Future[None]]] = defaultdict(set)
        self._fetched_s: dict[str, float] = {}

    async def answer(self, owner: str, request_id: str) -> Answer:
        """The answer of a request; one in state ``waiting`` where it did not come while a poll may wait.

        Raises:
            ApiError: There is no such request (404), or its answer is kept no more (410).
        """
        poll: asyncio.Future[None] = self._loop.create_future()
        self._polls[request_id].add(poll)  # before the answer is looked up, so that none slips through in between
        try:
            found = self._found(owner, request_id)
            if found.state == "waiting":
                await asyncio.wait({poll}, timeout=self._hold_s)
                found = self._found(owner, request_id)
        finally:
            self._polls[request_id].discard(poll)
            if not self._polls[request_id]:
                del self._polls[request_id]
            poll.cancel()
        if found.state == "gone":
            raise ApiError(410, f"the answer of {request_id} was fetched and is kept no more")
        if found.state != "waiting":
            self._fetched_s.setdefault(request_id, time.time())
        return found

    def done(self, request_id: str) -> None:
        """An answer is there."""
        self._loop.call_soon_threadsafe(self._wake, request_id)

    def forget(self, before_s: float) -> None:
        """Note which answers were fetched since the last call, and forget those fetched before a time."""
        fetched_s, self._fetched_s = self._fetched_s, {}
        self._records.note_fetched(fetched_s)
        self._records.drop_answers(before_s)

    def _found(self, owner: str, request_id: str) -> Answer:
        found = self._records.answer(request_id)
        if found is None or found[0] != owner:
            raise missing("request", request_id)
        return found[1]

    def _wake(self, request_id: str) -> None:
        for poll in self._polls.get(request_id, ()):
            if not poll.done():
                poll.set_result(None)
