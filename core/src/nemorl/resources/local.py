"""The local launcher: one worker, in this process. Nothing is started, copied or sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

from nemorl.errors import boundary

W = TypeVar("W")


class LocalWorkerGroup(Generic[W]):
    """A worker group of one rank that lives here."""

    def __init__(self, worker: W, name: str) -> None:
        self.worker = worker
        self.name = name

    @property
    def data_parallel_size(self) -> int:
        return 1

    def call(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        with boundary(self.name):
            return [getattr(self.worker, method)(*args, **kwargs)]

    def scatter(self, method: str, shards: Sequence[tuple[Any, ...]]) -> list[Any]:
        assert len(shards) == 1, f"one rank cannot take {len(shards)} shards"
        return self.call(method, *shards[0])

    def shutdown(self) -> None:
        self.call("shutdown")
