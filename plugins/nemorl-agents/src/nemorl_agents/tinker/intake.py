"""Intake: requests are on the disk before they are promised, and those that come together share one write."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from nemorl_agents.tinker.errors import ApiError
from nemorl_agents.tinker.records import Records, Request

MOST_BYTES = 32 << 20
"""Of bodies in one write, beyond the first."""
Waiting = tuple[Request, asyncio.Future[None]]


class Intake:
    """Keeps requests. It lives on one event loop."""

    def __init__(self, records: Records, on_new: Callable[[Request], None]) -> None:
        """
        Args:
            records: Where they are kept.
            on_new: Told each request that is not a retry, in their order of arrival.
        """
        self._records, self._on_new = records, on_new
        self._waiting: list[Waiting] = []
        self._task: asyncio.Task[None] | None = None

    async def take(self, request: Request) -> None:
        """Returns when the request is kept.

        Raises:
            ApiError: Another body has its number.
            StorageError: The disk refuses.
        """
        kept: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((request, kept))
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._keep())
        await kept

    async def _keep(self) -> None:
        while self._waiting:
            batch = self._batch()
            try:
                found = await asyncio.to_thread(self._records.submit, [request for request, _ in batch])
            except Exception as error:
                for _, kept in batch:
                    _settle(kept, error)
                continue
            for (request, kept), outcome in zip(batch, found, strict=True):
                if outcome is True:
                    self._on_new(request)
                _settle(kept, outcome if isinstance(outcome, ApiError) else None)

    def _batch(self) -> list[Waiting]:
        size, count = 0, 0
        for request, _ in self._waiting:
            size += len(request.body or b"")
            if count and size > MOST_BYTES:
                break
            count += 1
        batch, self._waiting = self._waiting[:count], self._waiting[count:]
        return batch


def _settle(kept: asyncio.Future[None], error: Exception | None) -> None:
    """Tell whoever waits; nobody does where the client has hung up."""
    if kept.done():
        return
    if error is None:
        kept.set_result(None)
    else:
        kept.set_exception(error)
