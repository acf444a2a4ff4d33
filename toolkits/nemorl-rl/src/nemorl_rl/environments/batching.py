"""Batcher: calls that are made one by one, answered by one call of a function over lists.

A call *asks*; nothing is computed yet. The first ask that is awaited runs the function over everything asked so far,
and what is asked later belongs to the next batch. So no timer decides what is in a batch: the pool lets all episodes
of a turn ask before it awaits any (``Environment.batched``).
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Generator, Sequence
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

from nemorl_rl.environments.loop_thread import in_thread

Ask = TypeVar("Ask")
Answer = TypeVar("Answer")


class _Batch(Generic[Ask, Answer]):
    def __init__(self) -> None:
        self.asks: list[Ask] = []
        self.answers: Future[Sequence[Answer]] | None = None
        self.task: asyncio.Task[None] | None = None


class Batcher(Generic[Ask, Answer]):
    """Safe to ask from many threads; asks of one batch may be awaited on different event loops."""

    def __init__(self, function: Callable[[list[Ask]], Sequence[Answer] | Awaitable[Sequence[Answer]]]) -> None:
        """
        Args:
            function: All asks of a batch -> as many answers, in order. A blocking one runs in a thread of its own,
                an async one on the event loop of the first who waits.
        """
        self._function = function
        self._lock = threading.Lock()
        self._open: _Batch[Ask, Answer] = _Batch()

    def ask(self, ask: Ask) -> Awaitable[Answer]:
        """Join the open batch now; the answer when it is awaited."""
        with self._lock:
            batch = self._open
            batch.asks.append(ask)
            return _Pending(self, batch, len(batch.asks) - 1)

    async def answer(self, batch: _Batch[Ask, Answer], position: int) -> Answer:
        """The answer to the ask at this position; the first who wants one runs the batch."""
        with self._lock:
            is_first = batch.answers is None
            if batch.answers is None:
                batch.answers = Future()
                self._open = _Batch()
        if is_first:
            batch.task = asyncio.get_running_loop().create_task(self._run(batch, batch.answers))
        # Shielded: whoever gives up waiting must not take the answer away from the others.
        answers = await asyncio.shield(asyncio.wrap_future(batch.answers))
        return answers[position]

    async def _run(self, batch: _Batch[Ask, Answer], answers: Future[Sequence[Answer]]) -> None:
        try:
            result = await in_thread(self._function, batch.asks)
            answers.set_result(await result if isinstance(result, Awaitable) else result)
        except BaseException as error:
            answers.set_exception(error)


class _Pending(Generic[Ask, Answer]):
    """An answer to wait for. No coroutine before that: one that is never awaited would warn."""

    def __init__(self, batcher: Batcher[Ask, Answer], batch: _Batch[Ask, Answer], position: int) -> None:
        self._batcher, self._batch, self._position = batcher, batch, position

    def __await__(self) -> Generator[Any, None, Answer]:
        return self._batcher.answer(self._batch, self._position).__await__()
