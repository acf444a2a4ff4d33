"""A pool of processes that grade answers, each within a time limit, whatever the answers do to them.

A grader that hangs is killed, one that dies is replaced, and either way the caller gets a verdict. A pool that
cannot start at all is an error: scoring every answer 0 would teach the wrong lesson.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import CancelledError
from concurrent.futures import TimeoutError as FutureTimeout
from concurrent.futures.process import BrokenProcessPool
from typing import TYPE_CHECKING, Any, Literal

from nemorl.errors import PluginError, UsageError

from nemorl_math_env import worker

if TYPE_CHECKING:
    from pebble import ProcessPool

Grader = Callable[[str, str], worker.Verdict]
Outcome = Literal["right", "wrong", "unparsable", "timeout", "crash"]

START_DEADLINE_S = 120.0
"""A fresh worker imports sympy: about 1 s, more on a loaded machine. Later than this, it will not come."""


class GraderPool:
    """Safe to call from many threads. Starts with the first answer that needs it."""

    def __init__(self, *, timeout_s: float, workers: int, memory_gib: float, grader: Grader = worker.grade) -> None:
        self._timeout_s = timeout_s
        self._workers = workers
        self._memory_gib = memory_gib
        self._grader = grader
        self._lock = threading.Lock()
        # One slot per worker: an answer is handed over only when a worker is free, so waiting in line never counts
        # as the answer's own time and every wait below is bounded.
        self._slots = threading.BoundedSemaphore(workers)
        self._pool: ProcessPool | None = None
        self._running: set[Any] = set()
        self._closed = False

    @property
    def started(self) -> bool:
        return self._pool is not None

    def grade(self, truth: str, answer: str) -> Outcome:
        """The verdict on one answer, in at most about ``timeout_s`` once a worker is free."""
        from pebble import ProcessExpired

        with self._slots:
            for _ in range(2):
                pool = self._ready_pool()
                try:
                    return self._ask(pool, truth, answer)
                except ProcessExpired:
                    continue  # somebody killed the worker, or this answer did: then it does so again
                except (BrokenProcessPool, RuntimeError, _LostWorkerError):
                    # pebble gives a whole pool up when an idle worker dies (say, to the kernel's OOM killer).
                    self._discard(pool)
                    if self._closed:
                        return "timeout"
            return "crash"

    def _ask(self, pool: ProcessPool, truth: str, answer: str) -> Outcome:
        from pebble import ProcessExpired

        future: Any = pool.schedule(self._grader, args=(truth, answer), timeout=self._timeout_s)
        self._running.add(future)
        try:
            verdict: Outcome = future.result(timeout=self._timeout_s + START_DEADLINE_S)
        except FutureTimeout as error:
            if not future.done():  # not the answer's fault: no worker ever took it
                future.cancel()
                raise _LostWorkerError from error
            return "timeout"
        except CancelledError:
            return "timeout"
        except (ProcessExpired, BrokenProcessPool):
            raise
        except Exception:  # the grader itself raised (sympy raises nearly everything): one answer's problem
            return "crash"
        finally:
            self._running.discard(future)
        return verdict

    def _ready_pool(self) -> ProcessPool:
        from pebble import ProcessPool

        from nemorl_math_env.spawning import GraderContext

        with self._lock:
            if self._closed:
                raise UsageError("the math environment is closed", fix="build a new one from its config")
            if self._pool is None:
                pool = ProcessPool(
                    max_workers=self._workers,
                    initializer=worker.prepare,
                    initargs=(self._memory_gib,),
                    context=GraderContext(),  # type: ignore[arg-type]
                )
                self._await_first_worker(pool)
                self._pool = pool
            return self._pool

    def _await_first_worker(self, pool: ProcessPool) -> None:
        try:
            pool.schedule(worker.ready).result(timeout=START_DEADLINE_S)
        except Exception as error:
            _stop(pool)
            raise PluginError(
                f"the math environment's grader processes cannot start ({type(error).__name__}: {error})",
                fix="check `python -c 'import mpmath'`, and raise environment.memory_gib if it is low",
            ) from error

    def _discard(self, pool: ProcessPool) -> None:
        with self._lock:
            ours = self._pool is pool  # several threads may see one pool break
            if ours:
                self._pool = None
        if ours:
            _stop(pool)

    def close(self) -> None:
        """Stop the workers; threads that wait for a verdict get ``timeout``. Calling it twice is harmless."""
        self._closed = True
        for future in tuple(self._running):
            future.cancel()
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            _stop(pool)


class _LostWorkerError(Exception):
    """A worker neither answered nor was seen to die."""


def _stop(pool: ProcessPool) -> None:
    pool.stop()  # type: ignore[no-untyped-call]
    pool.join()
