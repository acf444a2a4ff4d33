"""Processes that grade answers, each within a time limit, whatever the answers do to them.

A grader that hangs is killed, one that dies is replaced, and either way the caller gets a verdict. Graders that
cannot start at all are an error: scoring every answer 0 would teach the wrong lesson.

Each grader is a pebble pool of one process. Processes of one pool share locks: one that is killed while it holds such
a lock would leave the others waiting for good.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import CancelledError
from concurrent.futures import TimeoutError as FutureTimeout
from concurrent.futures.process import BrokenProcessPool
from queue import LifoQueue
from typing import TYPE_CHECKING, Any, Literal

from nemorl.errors import PluginError, UsageError

from nemorl_math_env import worker

if TYPE_CHECKING:
    from pebble import ProcessPool

Grade = Callable[[str, str], worker.Verdict]
Outcome = Literal["right", "wrong", "unparsable", "timeout", "crash"]

START_DEADLINE_S = 60.0
"""A fresh grader starts a Python: about 1 s, more on a loaded machine. Later than this, it will not come."""
TAKE_DEADLINE_S = 30.0
"""A grader that has started takes an answer at once. Later than this, it stands still."""
STARTS = 3
"""Tries to start a grader: one that somebody kills as it starts says nothing about the next."""
DEATHS = 2
"""Graders that one answer may outlive. It may have killed the first; if the second dies, it has."""


class GraderPool:
    """Safe to call from many threads. A grader starts with the first answer that finds no other free."""

    def __init__(self, *, timeout_s: float, workers: int, memory_gib: float, grader: Grade = worker.grade) -> None:
        self._graders = [_Grader(grader, timeout_s, memory_gib) for _ in range(workers)]
        # An answer is handed over only when a grader is free, so waiting in line never counts as the answer's own
        # time. Whoever was free last is asked first: the others need not start.
        self._free: LifoQueue[_Grader] = LifoQueue()
        for each in reversed(self._graders):
            self._free.put(each)
        self._is_closed = False

    @property
    def started(self) -> bool:
        return any(grader.started for grader in self._graders)

    def grade(self, truth: str, answer: str) -> Outcome:
        """The verdict on one answer, in at most about ``timeout_s`` once a grader is free."""
        if self._is_closed:
            raise UsageError("the math environment is closed", fix="build a new one from its config")
        grader = self._free.get()
        try:
            return grader.grade(truth, answer)
        finally:
            self._free.put(grader)

    def close(self) -> None:
        """Stop the graders; threads that wait for a verdict get ``timeout``. Calling it twice is harmless."""
        self._is_closed = True
        for grader in self._graders:
            grader.close()


class _LostGraderError(Exception):
    """A grader neither answered nor was seen to die."""


class _Grader:
    """One process, for one answer at a time. It starts when it is asked, and again when it has gone."""

    def __init__(self, grade: Grade, timeout_s: float, memory_gib: float) -> None:
        self._grade, self._timeout_s, self._memory_gib = grade, timeout_s, memory_gib
        self._lock = threading.Lock()
        self._pool: ProcessPool | None = None
        self._running: Any = None
        self._is_closed = False

    @property
    def started(self) -> bool:
        return self._pool is not None

    def grade(self, truth: str, answer: str) -> Outcome:
        from pebble import ProcessExpired

        deaths = 0
        for _ in range(DEATHS + STARTS):
            pool = self._ready_pool()
            if pool is None:
                return "timeout"
            try:
                outcome = self._ask(pool, truth, answer)
            except ProcessExpired:
                deaths += 1
            except (BrokenProcessPool, RuntimeError, _LostGraderError):
                pass  # it had gone before it saw the answer
            else:
                if outcome == "timeout":  # its process was killed for that
                    self._discard(pool)
                return outcome
            self._discard(pool)
            if deaths == DEATHS:
                break
        return "crash"

    def _ask(self, pool: ProcessPool, truth: str, answer: str) -> Outcome:
        from pebble import ProcessExpired

        future: Any = pool.schedule(self._grade, args=(truth, answer), timeout=self._timeout_s)
        self._running = future
        try:
            verdict: Outcome = future.result(timeout=self._timeout_s + TAKE_DEADLINE_S)
        except FutureTimeout as error:
            if not future.done():  # not the answer's fault: no process ever took it
                future.cancel()
                raise _LostGraderError from error
            return "timeout"
        except CancelledError:
            return "timeout"
        except (ProcessExpired, BrokenProcessPool):
            raise
        except Exception:  # the grader itself raised: one answer's problem
            return "crash"
        return verdict

    def _ready_pool(self) -> ProcessPool | None:
        """``None`` once it is closed."""
        with self._lock:
            if self._is_closed:
                return None
            if self._pool is None:
                self._pool = self._started_pool()
            return self._pool

    def _started_pool(self) -> ProcessPool:
        from pebble import ProcessPool

        for _ in range(STARTS):
            pool = ProcessPool(
                max_workers=1,
                initializer=worker.prepare,
                initargs=(self._memory_gib,),
                context=worker.GraderContext(),  # type: ignore[arg-type]
            )
            try:
                pool.schedule(worker.ready).result(timeout=START_DEADLINE_S)
                return pool
            except Exception as error:
                _stop(pool)
                failure = error
        raise PluginError(
            f"the math environment's grader processes cannot start ({type(failure).__name__}: {failure})",
            fix="check `python -c 'import mpmath'`, and raise environment.memory_gib if it is low",
        ) from failure

    def _discard(self, pool: ProcessPool) -> None:
        with self._lock:
            is_ours = self._pool is pool  # not yet stopped by ``close``
            if is_ours:
                self._pool = None
        if is_ours:
            _stop(pool)

    def close(self) -> None:
        self._is_closed = True
        if self._running is not None:
            self._running.cancel()
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            _stop(pool)


def _stop(pool: ProcessPool) -> None:
    pool.stop()  # type: ignore[no-untyped-call]
    pool.join()
