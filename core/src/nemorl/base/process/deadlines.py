"""Deadlines for code of others that runs in the main thread: imports, ``build()``, hooks.

An alarm interrupts what sleeps, waits or loops in Python, and becomes a :class:`DeadlineError` that names the owner and
where it was. Code that never returns to Python cannot be interrupted: under the ``nemorl`` command the watchdog of
:mod:`faulthandler` then ends the process, and the supervisor says where it was stuck. Other threads have no deadline
here: Python interrupts the main one only.
"""

from __future__ import annotations

import faulthandler
import math
import signal
import sys
import threading
import time
from types import FrameType, TracebackType

from nemorl.base.process.stopping import supervised_file
from nemorl.errors import DeadlineError, Interrupted

SOON_S = 0.001
"""Seconds until an alarm that rang while its deadline was being set rings again."""
AGAIN_S = 5.0
"""Seconds until the next interruption of code that swallowed one."""
GRACE_S = 30.0
"""Seconds that interrupted code has to end, before the watchdog ends the process."""


class _Expired(Interrupted):
    """Raised inside the code that took too long. It passes boundaries and ``except Exception``."""


class deadline:  # noqa: N801  (reads as a statement: `with deadline("building environment 'math'", 60.0):`)
    """Interrupt the block after ``limit_s``. Deadlines may nest: the outer one waits while the inner one is on.

    Raises:
        DeadlineError: ``owner`` took too long.
    """

    def __init__(self, owner: str, limit_s: float, *, setting: str | None = None) -> None:
        """
        Args:
            owner: What runs in the block, for the error.
            limit_s: Seconds it may take.
            setting: The config key of this limit, for the fix. Unset: it has none.
        """
        self._owner, self._limit_s, self._setting = owner, limit_s, setting
        self._expired: _Expired | None = None

    def __enter__(self) -> None:
        is_main = threading.current_thread() is threading.main_thread()
        self._is_armed = sys.platform != "win32" and is_main and self._limit_s < math.inf
        if self._is_armed:
            self._began, self._caller = time.monotonic(), sys._getframe(1)
            self._handler = signal.signal(signal.SIGALRM, self._expire)
            self._outer_s, self._outer_again_s = signal.setitimer(signal.ITIMER_REAL, self._limit_s, AGAIN_S)
            self._watch(self._limit_s)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._is_armed:
            return
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, self._handler)
        if supervised_file() is not None:
            faulthandler.cancel_dump_traceback_later()
        if self._outer_s:
            left_s = max(SOON_S, self._outer_s - (time.monotonic() - self._began))
            signal.setitimer(signal.ITIMER_REAL, left_s, self._outer_again_s)
            self._watch(left_s)
        if self._expired is not None and error is not None:
            more_time = f"; if it needs the time, raise {self._setting}" if self._setting else ""
            raise DeadlineError(
                f"{self._owner} took more than {self._limit_s:g} s{self._expired}",
                fix=f"look for what it waits for{more_time}",
            ) from error

    def _expire(self, number: int, frame: FrameType | None) -> None:
        own = _own_method(frame)
        if own == "__exit__":  # an error here would reach the caller as it is: nothing is to be interrupted any more
            return
        if own == "__enter__" or self._is_in_tracer(frame):
            signal.setitimer(signal.ITIMER_REAL, SOON_S, AGAIN_S)
            return
        place = f"; it was in {frame.f_code.co_filename}, line {frame.f_lineno}" if frame is not None else ""
        self._expired = _Expired(place)
        raise self._expired

    def _is_in_tracer(self, frame: FrameType | None) -> bool:
        """The block is traced (coverage, a debugger), and it is the tracer that runs: it may hold a lock, for ever."""
        tracers = _tracers()
        while frame is not None and frame is not self._caller:
            if str(frame.f_globals.get("__name__")).partition(".")[0] in tracers:
                return True
            frame = frame.f_back
        return False

    def _watch(self, limit_s: float) -> None:
        descriptor = supervised_file()
        if descriptor is not None:
            faulthandler.dump_traceback_later(limit_s + GRACE_S, exit=True, file=descriptor)


def _tracers() -> set[str]:
    """Top packages of what traces, profiles or monitors this thread."""
    found = [tracer for tracer in (sys.gettrace(), sys.getprofile()) if tracer is not None]
    names = [str(getattr(tracer, "__module__", type(tracer).__module__)) for tracer in found]
    if monitoring := getattr(sys, "monitoring", None):  # Python 3.12
        names += filter(None, map(monitoring.get_tool, range(6)))
    return {name.partition(".")[0] for name in names}


def _own_method(frame: FrameType | None) -> str | None:
    """The method of :class:`deadline` that the main thread is in, also where a tracer or profiler runs inside it."""
    while frame is not None:
        if frame.f_code in (deadline.__enter__.__code__, deadline.__exit__.__code__):
            return frame.f_code.co_name
        frame = frame.f_back
    return None
