"""The local launcher: one worker, in this process. Nothing is started, copied or sent."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from nemorl.contracts.workers import P, R, References, S, ShardVerb, Verb
from nemorl.errors import boundary
from nemorl.resources.worker import AttachedFactory, HostGroup, Role, WorkerContext, WorkerFactory, WorkerHost
from nemorl.weights import Digested, Form, WeightHandle


class LocalWorkerGroup(HostGroup):
    """A worker group of one rank that lives here."""

    data_parallel_size = 1

    def __init__(self, factory: WorkerFactory, context: WorkerContext, name: str) -> None:
        self.name = name
        with boundary(name):
            self._host = WorkerHost(factory, context)

    def attach_engine(self, factory: AttachedFactory) -> None:
        """Build an engine beside the worker."""
        with boundary(self.name):
            self._host.attach_engine(factory)

    def call_as(self, role: Role, verb: Verb[P, R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        with boundary(self.name):
            return [self._host.call(role, verb.__name__, args, kwargs)]

    def scatter_as(
        self, role: Role, verb: ShardVerb[S, P, R], shards: Sequence[S], *args: P.args, **kwargs: P.kwargs
    ) -> list[R]:
        assert len(shards) == 1, f"one rank cannot take {len(shards)} shards"
        return self.call_as(role, verb, shards[0], *args, **kwargs)

    def put(self, values: Sequence[Any]) -> References:
        return list(values)

    def read(self, references: References) -> list[Any]:
        return list(references)

    def scatter_kept(
        self, verb: ShardVerb[S, P, R], shards: Sequence[S], *args: P.args, **kwargs: P.kwargs
    ) -> References:
        return self.scatter(verb, shards, *args, **kwargs)

    def submit(self, rank: int, verb: Verb[P, Future[R]], *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        return self.call(verb, *args, **kwargs)[0]

    def publish(
        self, transport: str, version: int, form: Form = "model", digested: Digested | None = None
    ) -> WeightHandle:
        with boundary(self.name):
            handle = self._host.publish(transport, version, form, digested)
        assert handle is not None, "the only rank is rank 0"
        return handle

    def shutdown(self) -> None:
        with boundary(self.name):
            self._host.shutdown()
