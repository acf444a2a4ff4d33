"""A thread that lets a progress display show that the process lives, while the main thread loads or computes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from nemorl.observe.console import Console

INTERVAL_S = 1.0
"""How often the display is asked; it decides itself when silence has been long enough."""


@contextmanager
def heartbeat(console: Console) -> Iterator[None]:
    """Let ``console`` beat for the length of the block."""
    is_over = threading.Event()

    def beat() -> None:
        while not is_over.wait(INTERVAL_S):
            console.beat()

    thread = threading.Thread(target=beat, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join(INTERVAL_S)
