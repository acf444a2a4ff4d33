"""One graceful-stop path: the first SIGINT or SIGTERM asks the run to finish its step, a second ends it at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Self

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class GracefulStop:
    """Inside the block, the first signal calls ``request`` with its name; the second acts as if we were not here."""

    def __init__(self, request: Callable[[str], None]) -> None:
        self._request = request
        self._previous: dict[signal.Signals, object] = {}

    def __enter__(self) -> Self:
        # Python delivers signals to the main thread only; a run in another thread is stopped through trainer.stop().
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._first) for number in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()

    def _first(self, number: int, _frame: FrameType | None) -> None:
        self._restore()
        self._request(signal.Signals(number).name)

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._previous = {}
