"""RequestDesk: single requests to the replicas of an engine, bounded, each with a deadline and an owner.

A thread of its own keeps the books, so that nobody who submits, cancels or answers ever waits here. Who waits for whom:
a request for a place (at most ``limit`` run on a replica, the others wait in order), then for its replica, both until
its deadline; all of them for the devices, where the engine shares these (``turn``), and for a lost replica's
replacement, after which its requests are made again with the same seeds.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import count
from queue import Empty, SimpleQueue

from nemorl.contracts import WorkerGroup
from nemorl.errors import BackendError, DeadlineError, WeightsLostError, WorkerLostError
from nemorl.types import Completion, GenerationRequest

from nemorl_rl.serving.requests import NamedRequests, notify_cancelled
from nemorl_rl.serving.routing import Router

Answer = Future[list[Completion]]

STALE_DEADLINES = 64
"""Deadlines of answered requests that are kept, beside as many as there are requests."""


@dataclass(eq=False)
class _Call:
    """A request on its way."""

    number: int
    request: GenerationRequest
    owner: str
    beginnings: Sequence[Hashable]
    limit_s: float
    """Seconds it may take"""
    answer: Answer = field(default_factory=Future)
    rank: int | None = None
    """The replica that it is with"""
    life: int = 0
    """Of the replicas, when it went there"""


class RequestDesk:
    """Everything that is public here may be called from any thread."""

    def __init__(
        self,
        workers: WorkerGroup,
        *,
        limit: int,
        turn: Callable[[], AbstractContextManager[None]],
        replace: Callable[[WorkerLostError, int], None],
        life: Callable[[], int],
        ranks: Callable[[], Sequence[int]] | None = None,
    ) -> None:
        """
        Args:
            workers: Replicas, each with ``NamedRequests``.
            limit: Most requests that run on one of them.
            turn: Has the devices while requests run.
            replace: Replaces lost replicas, given the life in which the loss was noticed.
            life: Counts replacements.
            ranks: Numbers of the replicas that take requests now. Unset: all, always.
        """
        self._workers, self._turn, self._replace, self._life = workers, turn, replace, life
        everybody = range(workers.data_parallel_size)
        self._router = Router(ranks or (lambda: everybody), limit)
        self._numbers = count()
        self._inbox: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        """Commands in order; ``None`` ends the thread."""
        self._calls: dict[int, _Call] = {}
        """Those without an answer."""
        self._waiting: deque[_Call] = deque()
        self._deadlines: list[tuple[float, int]] = []
        """A heap of moments of ``time.monotonic()``, and whose they are."""
        self._devices = ExitStack()
        """Holds the turn while requests are with replicas."""
        self._away = 0
        """Requests that replicas have, also those that nobody waits for any more."""
        self._is_held = False
        """Replicas are being replaced, or shut down: nothing is sent to them."""
        self._thread = threading.Thread(target=self._run, name="nemorl-requests", daemon=True)
        self._thread.start()

    def submit(
        self, request: GenerationRequest, *, owner: str, beginnings: Sequence[Hashable], limit_s: float
    ) -> Answer:
        """Have a request answered; see ``GenerationPolicy.submit``."""
        if not self._thread.is_alive():
            raise BackendError("this generation policy has been shut down", fix="build a new one")
        call = _Call(next(self._numbers), request, owner, beginnings, limit_s)
        self._inbox.put(lambda: self._begin(call))
        call.answer.add_done_callback(notify_cancelled)
        call.answer.add_done_callback(lambda _: self._inbox.put(lambda: self._withdraw(call)))
        return call.answer

    def close(self) -> None:
        """Fail what is on its way. Calling it twice is harmless."""
        self._inbox.put(None)
        self._thread.join()

    # On the thread

    def _run(self) -> None:
        while True:
            wait_s = max(0.0, self._deadlines[0][0] - time.monotonic()) if self._deadlines else None
            try:
                command = self._inbox.get(timeout=wait_s)
            except Empty:
                self._expire()
                continue
            if command is None:
                break
            self._do(command)
        self._is_held = True
        closed = BackendError("the generation policy was shut down", fix="wait for its requests first")
        self._fail_all(closed)
        while not self._inbox.empty():  # what came meanwhile must not wait for ever
            late = self._inbox.get()
            if late is not None:
                self._do(late)
        self._fail_all(closed)
        self._devices.close()

    def _do(self, command: Callable[[], None]) -> None:
        """Nobody else would see what goes wrong here: it is everybody's error."""
        try:
            command()
        except Exception as error:
            self._fail_all(error)

    def _begin(self, call: _Call) -> None:
        if len(self._deadlines) > 2 * len(self._calls) + STALE_DEADLINES:
            self._deadlines = [entry for entry in self._deadlines if entry[1] in self._calls]
            heapify(self._deadlines)
        heappush(self._deadlines, (time.monotonic() + call.limit_s, call.number))
        self._calls[call.number] = call
        self._waiting.append(call)
        self._dispatch()

    def _dispatch(self) -> None:
        """Send waiting requests to replicas that have places."""
        while self._waiting and not self._is_held:
            if not self._away and not self._has_devices():
                return
            rank = self._router.choose(self._waiting[0].beginnings)
            if rank is None:
                if not self._router.loads:
                    self._begin_replacing(WorkerLostError("no replica is left", fix="see its log"), self._life())
                return
            self._send(self._waiting.popleft(), rank)

    def _has_devices(self) -> bool:
        """Wait for the turn; nothing that waits can be answered without."""
        self._devices.close()
        try:
            self._devices.enter_context(self._turn())
        except Exception as error:
            self._fail_all(error)
            return False
        return True

    def _send(self, call: _Call, rank: int) -> None:
        call.rank, call.life = rank, self._life()
        self._away += 1
        try:
            sent: Answer = self._workers.submit(rank, NamedRequests.begin, call.number, call.request)
        except Exception as error:
            sent = Future()
            sent.set_exception(error)
        sent.add_done_callback(lambda done: self._inbox.put(lambda: self._settle(call, rank, done)))

    def _settle(self, call: _Call, rank: int, done: Answer) -> None:
        """A replica has answered, or is lost."""
        self._away -= 1
        self._router.release(rank)
        error = None if done.cancelled() else done.exception()
        is_lost = isinstance(error, WorkerLostError) and not isinstance(error, WeightsLostError)
        if is_lost and call.number in self._calls:
            assert isinstance(error, WorkerLostError)
            self._repeat(call, error)
        elif not done.cancelled():
            with suppress(InvalidStateError):  # its deadline has passed, or it was cancelled
                if error is None:
                    call.answer.set_result(done.result())
                else:
                    call.answer.set_exception(error)
        self._dispatch()
        if not self._away:
            self._devices.close()

    def _repeat(self, call: _Call, error: WorkerLostError) -> None:
        """Put a request of a lost replica first in the queue, and have the replica replaced."""
        call.rank = None
        self._waiting.appendleft(call)
        if not self._is_held and call.life == self._life():
            self._begin_replacing(error, call.life)

    def _begin_replacing(self, error: WorkerLostError, life: int) -> None:
        self._is_held = True
        # A replacement takes as long as a start: others may be answered, cancelled or late meanwhile.
        threading.Thread(target=self._have_replaced, args=(error, life), daemon=True).start()

    def _have_replaced(self, error: WorkerLostError, life: int) -> None:
        failure: Exception | None = None
        try:
            self._replace(error, life)
        except Exception as reason:
            failure = reason
        self._inbox.put(lambda: self._resume(failure))

    def _resume(self, failure: Exception | None) -> None:
        self._is_held = False
        if failure is not None:
            self._fail_all(failure)
        self._dispatch()

    def _withdraw(self, call: _Call) -> None:
        """A request has its answer, or nobody waits for one any more."""
        if self._calls.pop(call.number, None) is not None and call.answer.cancelled():
            self._recall(call)

    def _recall(self, call: _Call) -> None:
        """A request is not to be answered: it leaves the queue, or its replica is told, which may be lost."""
        if call.rank is None:
            self._waiting.remove(call)
        else:
            with suppress(Exception):
                self._workers.submit(call.rank, NamedRequests.cancel, call.number)

    def _expire(self) -> None:
        now_s = time.monotonic()
        while self._deadlines and self._deadlines[0][0] <= now_s:
            call = self._calls.pop(heappop(self._deadlines)[1], None)
            if call is not None:
                self._recall(call)
                with suppress(InvalidStateError):
                    call.answer.set_exception(self._late_error(call))

    def _late_error(self, call: _Call) -> DeadlineError:
        where = "a place at a replica" if call.rank is None else f"replica {call.rank}"
        loads = ", ".join(map(str, self._router.loads.values()))
        return DeadlineError(
            f"{call.owner} waited {call.limit_s:g} s for {where} of the generation backend (requests by replica: "
            f"{loads}; waiting: {len(self._waiting)})",
            fix="give it more time, ask for fewer tokens, or add replicas (cluster.generation_workers)",
        )

    def _fail_all(self, error: Exception) -> None:
        calls, self._calls = [*self._calls.values()], {}
        for call in calls:
            self._recall(call)
            with suppress(InvalidStateError):
                call.answer.set_exception(error)
