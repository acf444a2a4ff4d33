"""Generation request by request: what an engine that takes them promises, and how a driver names them in its worker."""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import Future
from typing import Any, Protocol, runtime_checkable

from nemorl.contracts import GenerationBackend
from nemorl.types import Completion, GenerationRequest


@runtime_checkable
class RequestBackend(GenerationBackend, Protocol):
    """An engine that takes requests while others run (capability ``submit``); ``generate`` submits and waits.

    ``update_weights`` does not wait for running requests: each goes on, and every token after the update is drawn from
    the new weights alone, of which the completion says the first (``version_starts``). ``sleep`` is refused meanwhile.

    >>> future = engine.submit(GenerationRequest((5, 6), SamplingParams()))  # doctest: +SKIP
    >>> [one] = future.result()  # doctest: +SKIP
    """

    def submit(self, request: GenerationRequest) -> Future[list[Completion]]:
        """Begin a request and return at once, from any thread. It joins those that run and changes none of them.

        The future is given one completion per seed, or the error of this request alone. ``future.cancel()`` succeeds
        until then, and frees what the request holds before the engine's next step.
        """
        ...


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

    def cancel(self, number: int) -> None:
        """Cancel the request with this number, also before it comes."""
        with self._lock:
            answer = self._running.get(number)
            if answer is None:
                self._cancelled.append(number)
        if answer is not None:
            answer.cancel()

    def _forget(self, number: int) -> None:
        with self._lock:
            del self._running[number]
