"""How a driver names the requests in its worker, and hears of those that were cancelled."""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import Future
from typing import Any

from nemorl.contracts import RequestBackend
from nemorl.types import Completion, GenerationRequest


def notify_cancelled(future: Future[Any]) -> None:
    """A done callback: without it, ``concurrent.futures.wait`` takes no notice of a future that was cancelled."""
    if future.cancelled():
        future.set_running_or_notify_cancel()


EARLY_CANCELS = 1024
"""Cancelled requests that a worker remembers though it has not seen them: calls may overtake each other."""


class NamedRequests:
    """An engine in a worker, whose requests the driver knows by number. All other verbs are the engine's own."""

    def __init__(self, engine: RequestBackend) -> None:
        self._engine = engine
        self._running: dict[int, Future[list[Completion]]] = {}
        self._cancelled: deque[int] = deque(maxlen=EARLY_CANCELS)
        self._lock = threading.Lock()

    def __getattr__(self, verb: str) -> Any:
        return getattr(self._engine, verb)

    def begin(self, number: int, request: GenerationRequest) -> Future[list[Completion]]:
        """``submit`` under a number that no other request has."""
        with self._lock:
            if number in self._cancelled:
                self._cancelled.remove(number)
                gone: Future[list[Completion]] = Future()
                gone.add_done_callback(notify_cancelled)
                gone.cancel()
                return gone
            answer = self._running[number] = self._engine.submit(request)
        answer.add_done_callback(lambda _: self._forget(number))
        return answer

    def cancel(self, number: int) -> Future[None]:
        """Cancel the request with this number, also before it comes. The future is done."""
        with self._lock:
            answer = self._running.get(number)
            if answer is None:
                self._cancelled.append(number)
        if answer is not None:
            answer.cancel()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _forget(self, number: int) -> None:
        with self._lock:
            del self._running[number]
