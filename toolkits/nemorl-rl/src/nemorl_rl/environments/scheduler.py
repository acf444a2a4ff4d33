"""Scheduler: calls of an environment, many at once: worker threads make them, coroutines go on upon an event loop.

A call is one answer of the environment, or a whole episode where the environment drives the policy. The caller's thread
waits for results and is the only one that decides that one takes too long. It waits for a call no longer than that
call's deadline, so nothing the environment does can hold it up.
"""

from __future__ import annotations

import asyncio
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from nemorl.base.process.logs import log_ids
from nemorl.errors import ForeignError

from nemorl_rl.environments.loop_thread import LoopThread


@dataclass(eq=False, kw_only=True, slots=True)
class Job:
    """One call, and what became of it."""

    call: Callable[[], Any]
    """Returns the result, or an awaitable of it."""
    limit_s: float
    """Seconds that it may still run; waiting does not count."""
    ids: Mapping[str, Any] = field(default_factory=dict)
    """Of what it logs."""
    answer: Any = None
    """The result, or the exception that was raised."""
    is_late: bool = False
    """It was given up, and has no answer."""
    taken_s: float = field(default_factory=time.monotonic)
    """When it was first called: like the next two, a moment of ``time.monotonic()``."""
    began_s: float = field(default_factory=time.monotonic)
    """When it last began to run: on the event loop, where it is a coroutine."""
    ended_s: float = 0.0
    spent_s: float = 0.0
    """Seconds that it ran."""
    task: asyncio.Task[None] | None = None
    in_thread: bool = False
    is_over: bool = False
    """Answered or given up: whatever else comes is ignored."""

    def result(self, owner: str) -> Any:
        """The answer; raises what the call raised.

        ``SystemExit`` and its like would pass in the caller's thread for what a person asks of it: they are errors of
        ``owner``.
        """
        if not isinstance(self.answer, BaseException):
            return self.answer
        if isinstance(self.answer, Exception):
            raise self.answer
        what = f"{owner} raised {type(self.answer).__name__}: {self.answer}"
        raise ForeignError(what, fix="raise an Exception to end a run with an error") from self.answer


J = TypeVar("J", bound=Job)


class Scheduler:
    """Single use: one call of :meth:`ended`."""

    def __init__(
        self,
        name: str,
        loop: Callable[[], LoopThread],
        *,
        concurrency: int,
        silence_s: float,
        batched: bool = False,
        on_dead: Callable[[], None] = lambda: None,
    ) -> None:
        """
        Args:
            name: Of its threads.
            loop: The event loop, asked for when the first coroutine comes.
            concurrency: Threads, and coroutines, that run at the same time.
            silence_s: Nothing running, beginning or ending for this long is a blocked event loop.
            batched: All calls are made before any coroutine is awaited.
            on_dead: Called before what is left is given up together; may raise.
        """
        self.was_late = False
        """A job was given up."""
        self._name, self._loop, self._batched = name, loop, batched
        self._silence_s, self._on_dead = silence_s, on_dead
        self._slots = concurrency
        self._slot = asyncio.Semaphore(concurrency)
        self._lock = threading.Lock()
        self._waiting: deque[Job] = deque()
        self._running: set[Job] = set()
        self._done: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._threads = 0
        self._asking = 0
        """Jobs whose call has yet to return."""
        self._asked: list[tuple[Job, Awaitable[Any]]] = []
        """Awaitables of a batched environment, until all have asked."""
        self._last_sign = time.monotonic()

    def ended(self, jobs: Sequence[J]) -> Iterator[J]:
        """The jobs as they end or are given up. When as many in a row as run at once are late, all the others are."""
        self._waiting.extend(jobs)
        self._slots, self._asking = min(self._slots, len(jobs)), len(jobs)
        shortest_s = min((job.limit_s for job in jobs), default=0.0)
        missing = len(jobs)
        late_in_a_row = 0
        try:
            self._add_thread()
            while missing:
                try:
                    job = self._next_done(shortest_s)
                except queue.Empty:
                    late = self._give_up(self._late(jobs))
                    late_in_a_row += len(late)
                    is_dead = missing > len(late) and (late_in_a_row >= self._slots or self._is_silent())
                    self.was_late |= is_dead or bool(late)
                    if is_dead:
                        self._on_dead()
                        late += self._give_up_all(jobs)
                    yield from late
                    missing -= len(late)
                    continue
                late_in_a_row = 0
                missing -= 1
                yield job  # type: ignore[misc]  # one of `jobs`
        finally:
            self._give_up_all(jobs)

    # Deadlines, in the caller's thread

    def _next_done(self, shortest_s: float) -> Job:
        """The next answer, or ``queue.Empty`` at the nearest deadline. The clock is read only when none is there."""
        try:
            return self._done.get_nowait()
        except queue.Empty:
            return self._done.get(timeout=self._patience_s(shortest_s))

    def _patience_s(self, shortest_s: float) -> float:
        """Seconds until the nearest deadline of a job that runs, or that begins meanwhile and has ``shortest_s``."""
        with self._lock:
            nearest = min((job.began_s + job.limit_s for job in self._running), default=math.inf)
        return max(0.0, min(nearest - time.monotonic(), shortest_s))

    def _late(self, jobs: Sequence[J]) -> list[J]:
        now = time.monotonic()
        with self._lock:
            return [job for job in jobs if job in self._running and job.began_s + job.limit_s <= now]

    def _is_silent(self) -> bool:
        with self._lock:
            return not self._running and time.monotonic() - self._last_sign > self._silence_s

    def _give_up_all(self, jobs: Sequence[J]) -> list[J]:
        """Begin nothing more and wait for nothing."""
        with self._lock:
            self._waiting.clear()
        return self._give_up(jobs)

    def _give_up(self, jobs: Sequence[J]) -> list[J]:
        """Stop waiting for jobs; those that were not over."""
        given_up = []
        for job in jobs:
            with self._lock:
                if job.is_over:
                    continue
                job.is_over = job.is_late = True
                job.ended_s = time.monotonic()
                self._running.discard(job)
                was_in_thread, job.in_thread = job.in_thread, False
            given_up.append(job)
            if job.task is not None:
                self._loop().loop.call_soon_threadsafe(job.task.cancel)
            elif was_in_thread:  # the thread stays behind; another one takes its place
                with self._lock:
                    self._threads -= 1
                self._add_thread()
                self._has_asked()
        return given_up

    # Worker threads

    def _add_thread(self) -> None:
        with self._lock:
            if not self._waiting or self._threads >= self._slots:
                return
            self._threads += 1
        threading.Thread(target=self._work, name=f"environment-{self._name}", daemon=True).start()

    def _work(self) -> None:
        """Take jobs until none is left. Threads are added one by one while there is more to do than they manage, so
        that coroutines, whose call returns at once, do not get a thread each."""
        while (job := self._take()) is not None:
            self._add_thread()
            answer: Any
            try:
                with log_ids(**job.ids):
                    answer = job.call()
            except BaseException as error:
                answer = error
            with self._lock:
                if not job.in_thread:  # given up, and this thread was replaced
                    return
                job.in_thread = False
            if isinstance(answer, Awaitable):
                self._pause(job)
                with self._lock:
                    self._asked.append((job, answer))
            else:
                self._finish(job, answer)
            self._has_asked()

    def _take(self) -> Job | None:
        with self._lock:
            if not self._waiting:
                self._threads -= 1
                return None
            job = self._waiting.popleft()
            job.in_thread = True
            self._begin(job)
            job.taken_s = job.began_s
            return job

    def _has_asked(self) -> None:
        """One more call has returned: await what there is to await, in a batched environment only when all have."""
        with self._lock:
            self._asking -= 1
            if self._batched and self._asking > 0:
                return
            asked, self._asked = self._asked, []
        for job, awaitable in asked:
            self._loop().loop.call_soon_threadsafe(self._await, job, awaitable)

    # On the event loop

    def _await(self, job: Job, awaitable: Awaitable[Any]) -> None:
        if job.is_over:
            _close(awaitable)
        else:
            with log_ids(**job.ids):
                job.task = asyncio.get_running_loop().create_task(self._answer(job, awaitable))

    async def _answer(self, job: Job, awaitable: Awaitable[Any]) -> None:
        try:
            async with self._slot:
                with self._lock:
                    if not job.is_over:
                        self._begin(job)
                if job.is_over:
                    _close(awaitable)
                    return
                answer: Any = await awaitable
        except BaseException as error:
            if job.is_over:  # cancelled by us
                _close(awaitable)
                return
            answer = error
        self._finish(job, answer)

    # The clock of a job

    def _begin(self, job: Job) -> None:
        job.began_s = self._last_sign = time.monotonic()
        self._running.add(job)

    def _pause(self, job: Job) -> None:
        """It waits for its turn on the event loop, which is not its own time."""
        with self._lock:
            self._running.discard(job)
            self._last_sign = time.monotonic()
            took_s = self._last_sign - job.began_s
            job.limit_s -= took_s
            job.spent_s += took_s

    def _finish(self, job: Job, answer: Any) -> None:
        self._pause(job)
        with self._lock:
            if job.is_over:
                return
            job.is_over = True
            job.answer, job.ended_s = answer, self._last_sign
        self._done.put(job)


def _close(awaitable: Awaitable[Any]) -> None:
    """Nobody will await it: spare the warning."""
    if isinstance(awaitable, Coroutine):
        awaitable.close()
