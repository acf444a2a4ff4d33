"""Worker: the one thread that owns the models. Each model's requests run in its order, and no client waits for all.
Where samples need nothing of what trains (``Models.samples_apart``), a second thread answers them.

Clients take turns: a model's turn ends with an optimizer step or after a number of requests, a sampler's with one call
over all that waits for its weights.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from nemorl.errors import StorageError

from nemorl_agents.tinker.errors import ApiError, failure_of
from nemorl_agents.tinker.execution import Done, Execution, done, failed
from nemorl_agents.tinker.order import Order
from nemorl_agents.tinker.records import Answer, Kind, Records, Request
from nemorl_agents.tinker.sampling import Sampling
from nemorl_agents.tinker.saving import Saving

log = logging.getLogger(__name__)

MOST_A_TURN = 64
"""Requests of one model before another one's turn."""
MOST_A_CALL = 1024
"""Sequences that are sampled by one call, beyond those of its first request."""
GATHER_S, LONGEST_GATHER_S = 0.01, 0.1
"""A client sends each prompt by itself. A call begins once so long none has come after the last, or at the latest."""
CHANGES: frozenset[Kind] = frozenset({"create_model", "load_weights", "forward_backward", "optim_step"})
"""Kinds that change a model in memory."""
DISK_S = 5.0
"""Until the journal is tried again where the disk refused."""


class Worker:
    """Runs requests. Its methods may be called from any thread."""

    def __init__(
        self,
        execution: Execution,
        saving: Saving,
        on_done: Callable[[str], None],
    ) -> None:
        """
        Args:
            execution: What requests do.
            saving: What those do that save.
            on_done: Told the id of each request whose answer is there.
        """
        self._execution, self._saving, self._on_done = execution, saving, on_done
        self._sampling = Sampling(execution)
        self._records: Records = execution.records
        self._changed = threading.Condition()
        self._orders: dict[str, Order] = {}
        self._samples: dict[str, deque[str]] = {}
        self._turns: OrderedDict[tuple[str, str], None] = OrderedDict()
        """Models ("model") and weights ("sample") with requests that wait; first whose turn is next"""
        self._jobs: deque[Callable[[], None]] = deque()
        self._ending = threading.Event()
        lanes: list[tuple[str, ...]] = [("model", "sample")]
        if execution.models.samples_apart:
            lanes = [("model",), ("sample",)]
        self._threads = [
            threading.Thread(target=self._run, args=[kinds], name=f"nemorl-tinker-{kinds[0]}", daemon=True)
            for kinds in lanes
        ]

    def start(self) -> None:
        """Begin with what is there."""
        for thread in self._threads:
            thread.start()

    def shutdown(self) -> None:
        """End after the request that runs."""
        with self._changed:
            self._ending.set()
            self._changed.notify_all()
        for thread in self._threads:
            if thread.is_alive():
                thread.join()

    def offer(self, request_id: str, model_id: str, seq: int) -> None:
        """Take in a request of a model."""
        with self._changed:
            if model_id not in self._orders:
                self._orders[model_id] = Order(self._records.next_seq(model_id))
            self._orders[model_id].offer(seq, request_id)
            self._turns.setdefault(("model", model_id))
            self._changed.notify_all()

    def offer_sample(self, request_id: str, lane: str) -> None:
        """Take in a request of a sampler."""
        with self._changed:
            self._samples.setdefault(lane, deque()).append(request_id)
            self._turns.setdefault(("sample", lane))
            self._changed.notify_all()

    def missing(self, model_id: str) -> int | None:
        """The number of the request that a model's others wait for, where it has not come."""
        with self._changed:
            order = self._orders.get(model_id)
            return None if order is None else order.missing

    def cancel(self, request_id: str, lane: str) -> None:
        """Leave out a sample that waits; one that runs goes on."""
        with self._changed:
            waiting = self._samples.get(lane, deque())
            if request_id not in waiting:
                return
            waiting.remove(request_id)
        self.soon(lambda: self._fail([request_id], ApiError(410, "cancelled by its client")))

    def soon(self, job: Callable[[], None]) -> None:
        """Call something on this thread, before the next request."""
        with self._changed:
            self._jobs.append(job)
            self._changed.notify_all()

    def end(self, model_ids: Iterable[str], reason: Exception, status: Mapping[str, Any]) -> None:
        """Forget models for good, as their session ended so: what waits for them fails."""
        for model_id in model_ids:
            self._execution.flight.end(model_id, status, partial(self._execution.save, model_id))
            with self._changed:
                order = self._orders.pop(model_id, None)
            self._fail([] if order is None else order.drain(), reason)
            self._execution.forget(model_id)
            self._execution.folders.forget(model_id)

    def unload(self, request_id: str, model_id: str) -> None:
        """Forget a model for good because its client asks for it."""
        request = self._records.requests.get(request_id)
        if request is None or request.state != "waiting":
            return
        self.end([model_id], ApiError(410, f"the model {model_id} was unloaded"), {"type": "success"})
        answer = done({"type": "unload_model", "model_id": model_id}).answer
        if not self._kept([(request, answer)], None):
            self._pause()
            self.soon(lambda: self.unload(request_id, model_id))
            return
        self._on_done(request_id)

    def park(self, model_id: str) -> None:
        """Take a model out of memory until its next request."""
        with self._changed:
            is_idle = not self._orders.get(model_id, ())
        if is_idle:
            self._execution.forget(model_id)

    # The thread

    def _run(self, kinds: Collection[str]) -> None:
        while True:
            with self._changed:
                job, turn = self._next(kinds)
                if self._ending.is_set():
                    return
                if job is None and turn is None:
                    self._changed.wait()
                    continue
            try:
                if job is not None:
                    job()
                elif turn is not None:
                    (self._model_turn if turn[0] == "model" else self._sample_turn)(turn[1])
            except Exception:
                log.exception("a Tinker server's worker goes on after an error of its own")
                self._pause()

    def _next(self, kinds: Collection[str]) -> tuple[Callable[[], None] | None, tuple[str, str] | None]:
        if self._jobs and "model" in kinds:
            return self._jobs.popleft(), None
        for turn in [turn for turn in self._turns if turn[0] in kinds]:
            kind, name = turn
            is_ready = self._samples.get(name) if kind == "sample" else self._first(name) is not None
            if is_ready:
                self._turns.move_to_end(turn)
                return None, turn
            if kind == "sample":
                self._samples.pop(name, None)  # each save makes weights of its own
            if kind == "sample" or not self._orders.get(name):
                del self._turns[turn]
        return None, None

    def _first(self, model_id: str) -> str | None:
        order = self._orders.get(model_id)
        return None if order is None else order.first()

    def _model_turn(self, model_id: str) -> None:
        for _ in range(MOST_A_TURN):
            with self._changed:
                request_id = None if self._ending.is_set() or self._jobs else self._first(model_id)
            request = None if request_id is None else self._records.requests.get(request_id)
            if request is None:
                return
            done, answer = self._tried(request)
            is_step = request.kind == "optim_step"
            if done is not None and is_step:  # the samples of a step cannot be asked for again once it is known
                self._execution.flight.ran(request, done.payload)
            if not self._kept([(request, answer)], done):
                self._execution.forget(model_id)  # what it did is not kept: it is done again
                self._pause()
                return
            with self._changed:
                self._orders[model_id].advance()
            if done is not None and not is_step:
                self._execution.flight.ran(request, done.payload)
            self._on_done(request.id)
            if done is not None:
                done.after()
            if is_step:
                return

    def _tried(self, request: Request) -> tuple[Done | None, Answer]:
        runner = self._saving if request.kind.startswith("save") else self._execution
        try:
            done = runner.run(request)
        except Exception as error:
            if failure_of(error)[1] == "server":
                log.exception("a request of kind %s failed", request.kind)
                if request.kind in CHANGES:
                    self._execution.forget(request.scope)  # it may be half done: the model is built anew
            return None, failed(error)
        return done, done.answer

    def _sample_turn(self, lane: str) -> None:
        requests = self._taken(lane)
        if not requests:
            return
        answers = self._sampling.run(requests)
        if not self._kept([*zip(requests, answers, strict=True)], None):
            with self._changed:
                self._samples.setdefault(lane, deque()).extendleft(request.id for request in reversed(requests))
                self._turns.setdefault(("sample", lane))
            self._pause()
            return
        pairs = zip(requests, answers, strict=True)
        self._execution.flight.sampled([(request, one.payload) for request, one in pairs if one.state == "done"])
        for request in requests:
            self._on_done(request.id)

    def _taken(self, lane: str) -> list[Request]:
        """The requests of one call, which wait no more."""
        requests: list[Request] = []
        sequences = 0
        with self._changed:
            self._gather(self._samples[lane])
        while True:
            with self._changed:
                waiting = self._samples[lane]
                request_id = waiting.popleft() if waiting else None
            if request_id is None:
                return requests
            request = self._records.requests.get(request_id)
            if request is None or request.state != "waiting":
                continue
            sequences += request.sequences
            if requests and sequences > MOST_A_CALL:
                with self._changed:
                    self._samples[lane].appendleft(request_id)
                return requests
            requests.append(request)

    def _gather(self, waiting: deque[str]) -> None:
        """Wait while more requests for the same weights come; the condition is held, and free meanwhile."""
        latest_s, count = time.monotonic() + LONGEST_GATHER_S, 0
        while count < len(waiting) < MOST_A_CALL and time.monotonic() < latest_s and not self._ending.is_set():
            count = len(waiting)
            self._changed.wait_for(lambda: len(waiting) != count or self._ending.is_set(), GATHER_S)  # noqa: B023

    def _kept(self, answers: Sequence[tuple[Request, Answer]], done: Done | None) -> bool:
        """Write answers, and what belongs to them, in one transaction; False where the disk refuses."""
        try:
            with self._records.journal.writing():
                for put in [] if done is None else done.rows:
                    put()
                for request, answer in answers:
                    self._records.finish(request, answer, keeps_body=done is not None and done.keeps_body)
        except StorageError as error:
            log.error("%s: %d answers wait for %.0f s", error.message, len(answers), DISK_S)
            return False
        return True

    def _fail(self, request_ids: Sequence[str], reason: Exception) -> None:
        found = [self._records.requests.get(request_id) for request_id in request_ids]
        if not self._kept([(request, failed(reason)) for request in found if request is not None], None):
            self._pause()
            self.soon(lambda: self._fail(request_ids, reason))
            return
        for request_id in request_ids:
            self._on_done(request_id)

    def _pause(self) -> None:
        self._ending.wait(DISK_S)
