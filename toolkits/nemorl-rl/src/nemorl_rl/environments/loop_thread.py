"""Threads of the environment pool: an event loop of its own, and blocking calls beside it. All are daemons.

A thread cannot be ended from outside. What is stuck is abandoned, and being a daemon it does not keep the process
alive; ``asyncio.to_thread`` and executors would, since Python joins their threads at exit.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")


async def in_thread(function: Callable[..., T], *args: Any) -> T:
    """Await a blocking call that runs in a thread of its own."""
    answer: Future[T] = Future()

    def run() -> None:
        try:
            answer.set_result(function(*args))
        except StopIteration as error:  # which no future takes: it would hang whoever awaits it
            stopped = RuntimeError(f"StopIteration: {error}")
            stopped.__cause__ = error
            answer.set_exception(stopped)
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=run, name="environment-call", daemon=True).start()
    # Shielded: cancelling a future that a thread is about to set would make the thread fail.
    return await asyncio.shield(asyncio.wrap_future(answer))


class LoopThread:
    """A running event loop."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._stopping = threading.Lock()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def responds(self, within_s: float) -> bool:
        """The loop answers in time; one that runs blocking code does not."""
        turned = threading.Event()
        self.loop.call_soon_threadsafe(turned.set)
        return turned.wait(within_s)

    def stop(self) -> None:
        """End the loop as soon as it turns; what runs on it is cancelled. Does not wait. Twice is harmless."""
        if self._stopping.acquire(blocking=False):  # a second stop would interrupt the cancelling
            self.loop.call_soon_threadsafe(self.loop.stop)

    def _turn(self) -> None:
        """Run until stopped. A task that raises SystemExit or KeyboardInterrupt fails with it; asyncio would end the
        loop as well, under all the others."""
        while not self._stopping.locked():
            with suppress(SystemExit, KeyboardInterrupt):
                self.loop.run_forever()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self._turn()
            tasks = asyncio.all_tasks(self.loop)
            for task in tasks:
                task.cancel()
            self.loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        finally:
            self.loop.close()
