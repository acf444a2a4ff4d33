"""The local launcher: one worker, in this process. Nothing is started, copied or sent."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Concatenate

from nemorl.contracts.workers import P, R, Shard, Verb
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

    def call(self, verb: Verb[P, R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        return self.call_as("backend", verb, *args, **kwargs)

    def call_as(self, role: Role, verb: Verb[P, R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        with boundary(self.name):
            return [self._host.call(role, verb.__name__, args, kwargs)]

    def scatter(
        self, verb: Verb[Concatenate[Shard, P], R], shards: Sequence[Shard], *args: P.args, **kwargs: P.kwargs
    ) -> list[R]:
        return self.scatter_as("backend", verb, shards, *args, **kwargs)

    def scatter_as(
        self,
        role: Role,
        verb: Verb[Concatenate[Shard, P], R],
        shards: Sequence[Shard],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> list[R]:
        assert len(shards) == 1, f"one rank cannot take {len(shards)} shards"
        return self.call_as(role, verb, shards[0], *args, **kwargs)

    def submit(self, rank: int, verb: Verb[P, Future[R]], *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        [begun] = self.call(verb, *args, **kwargs)
        return begun

    def publish(self, transport: str, version: int, form: Form = "model") -> WeightHandle:
        with boundary(self.name):
            handle = self._host.publish(transport, version, form)
        assert handle is not None, "the only rank is rank 0"
        return handle

    def shutdown(self) -> None:
        with boundary(self.name):
            self._host.shutdown()
