"""The local launcher: one worker, in this process. Nothing is started, copied or sent."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from nemorl.errors import boundary
from nemorl.resources.worker import AttachedFactory, Role, WorkerContext, WorkerFactory, WorkerHost
from nemorl.weights import Form, WeightHandle


class LocalWorkerGroup:
    """A worker group of one rank that lives here."""

    def __init__(self, factory: WorkerFactory, context: WorkerContext, name: str) -> None:
        self.name = name
        with boundary(name):
            self._host = WorkerHost(factory, context)

    def attach_engine(self, factory: AttachedFactory) -> None:
        """Build an engine beside the worker."""
        with boundary(self.name):
            self._host.attach_engine(factory)

    @property
    def data_parallel_size(self) -> int:
        return 1

    def call(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        return self.call_as("backend", method, *args, **kwargs)

    def call_as(self, role: Role, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        with boundary(self.name):
            return [self._host.call(role, method, args, kwargs)]

    def scatter(self, method: str, shards: Sequence[tuple[Any, ...]]) -> list[Any]:
        return self.scatter_as("backend", method, shards)

    def scatter_as(self, role: Role, method: str, shards: Sequence[tuple[Any, ...]]) -> list[Any]:
        assert len(shards) == 1, f"one rank cannot take {len(shards)} shards"
        return self.call_as(role, method, *shards[0])

    def submit(self, rank: int, method: str, *args: Any) -> Future[Any]:
        [found] = self.call(method, *args)
        if isinstance(found, Future):
            return found
        done: Future[Any] = Future()
        done.set_result(found)
        return done

    def publish(self, transport: str, version: int, form: Form = "model") -> WeightHandle:
        with boundary(self.name):
            handle = self._host.publish(transport, version, form)
        assert handle is not None, "the only rank is rank 0"
        return handle

    def shutdown(self) -> None:
        with boundary(self.name):
            self._host.shutdown()
