"""A thread that lets a progress display show that the process lives, while the main thread loads or computes."""

from __future__ import annotations

import threading
from collections.abc import Callable

INTERVAL_S = 1.0
"""How often the display is asked; it decides itself when silence has been long enough."""


class Heartbeat:
    """Calls ``beat`` every second until it is stopped."""

    def __init__(self, beat: Callable[[], None]) -> None:
        self._beat, self._is_over = beat, threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._is_over.wait(INTERVAL_S):
            self._beat()

    def stop(self) -> None:
        self._is_over.set()
        self._thread.join(INTERVAL_S)
