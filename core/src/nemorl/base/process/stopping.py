"""One graceful-stop path: the first SIGINT, SIGTERM or SIGHUP asks the run to finish its step, a second ends it."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Self

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
NOBODY_WATCHES = "lost the terminal"
"""The stop reason of a run whose progress display cannot be written."""


class GracefulStop:
    """Inside the block, the first signal calls ``request`` with its name; the second acts as if we were not here.

    Python handles signals in the main thread; in another one, the block does nothing.
    """

    def __init__(self, request: Callable[[str], None]) -> None:
        self._request = request
        self._previous: dict[signal.Signals, object] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                # Who starts a program with nohup wants it to outlive the terminal.
                if number is not signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                    self._previous[number] = signal.signal(number, self._first)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()

    def _first(self, number: int, _frame: FrameType | None) -> None:
        note(signal=number, time=time.time())
        self._restore()
        self._request(signal.Signals(number).name)

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._previous = {}


# Notes of a process to its supervisor


VARIABLE = "NEMORL_SUPERVISOR"
MARK = b"\x1enemorl "
"""The beginning of a line of notes. Other lines of the file come from :mod:`faulthandler`."""


def note(**facts: object) -> None:
    """One line for the supervisor. May be called anywhere, signal handlers included, and never raises."""
    descriptor = supervised_file()
    if descriptor is None:
        return
    import json

    try:
        os.write(descriptor, MARK + json.dumps(facts, default=str).encode() + b"\n")
    except OSError:
        return


def supervised_file() -> int | None:
    """Descriptor of the file that the supervisor reads; ``None``: this process has no supervisor."""
    descriptor, _, process = os.environ.get(VARIABLE, "").partition(":")
    return int(descriptor) if process == str(os.getpid()) else None
