"""The contents of a worker process: a backend, perhaps an engine attached to it, and the senders of its weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from nemorl.contracts.workers import P, R, ReferringGroup, S, ShardVerb, Verb
from nemorl.errors import BackendError
from nemorl.weights import Digested, Form, WeightHandle, transport

if TYPE_CHECKING:
    from nemorl.config.models import PolicyConfig
    from nemorl.contracts import Head, TrainingBackend


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """One rank of one worker group: plain data, handed to every backend's ``build``."""

    device: str = "cpu"
    """torch device string of this rank: ``cpu``, ``cuda:0``, …"""
    seed: int = 42
    rank: int = 0
    world_size: int = 1
    master_address: str = "127.0.0.1"
    master_port: int = 0
    """Rendezvous for process groups; 0 while world_size is 1."""
    collective_timeout_s: float = 1800.0
    """Deadline of a collective operation: a rank that waits longer reports who is missing."""
    scratch: Path | None = None
    """A folder of this run for temporary files."""
    gpus: tuple[str, ...] = ()
    """Ids of the GPUs that a worker sees which spreads over several; others see the one that Ray gave them"""
    further_nodes: tuple[Callable[[], Any], ...] = ()
    """Each starts the actor (``RayWorker``) of a node beyond the worker's own, which ends with the worker."""
    further_gpus: tuple[tuple[str, ...], ...] = ()
    """Ids of the GPUs on each of these"""
    leaves_memory: bool = False
    """Whether it is asked to give device memory back while others work."""


WorkerFactory = Callable[[WorkerContext], Any]
"""Builds the object that a worker process holds: a class, or a picklable function. It runs inside the process."""

Role = Literal["backend", "engine", "host"]
"""An object of a worker process: the backend that it was made for, the engine attached to it, or what holds both."""

AttachedFactory = Callable[[Any, WorkerContext], Any]
"""Builds an object that lives in another one's process, given that one: an engine over a trainer's own weights."""

SUBMITTED_CALLS = 256
"""Submitted to one worker at the same time."""


class WorkerHost:
    """The object of one rank, and the sending end of its weights."""

    def __init__(self, factory: WorkerFactory, context: WorkerContext) -> None:
        self.worker = factory(context)
        self._context = context
        self._engine: Any = None
        self._senders: dict[str, Any] = {}

    def attach_engine(self, factory: AttachedFactory) -> None:
        """Build an engine beside the object, over its weights."""
        self._engine = factory(self.worker, self._context)

    def call(self, role: Role, method: str, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        """One method of the object in a role: of a verb, its name alone reaches a worker's process."""
        owner = {"backend": self.worker, "engine": self._engine, "host": self}[role]
        return getattr(owner, method)(*args, **(kwargs or {}))

    def publish(
        self, name: str, version: int, form: Form = "model", digested: Digested | None = None
    ) -> WeightHandle | None:
        """The weights under ``version``, over the transport ``name``. Collective: rank 0 returns the handle."""
        export = self.worker.export_weights if form == "model" else self.worker.export_adapters
        if self._context.rank > 0:
            for _ in export():
                pass
            return None
        if name not in self._senders:
            self._senders[name] = transport(name)
        export, digests = (export, None) if digested is None else digested(export)
        return WeightHandle(name, version, self._senders[name].publish(export), form, digests)

    def shutdown(self) -> None:
        """Shut the engine and the object down, and release what was published."""
        with ExitStack() as stack:  # each, whatever the others raise
            stack.callback(self.withdraw)
            stack.callback(self.worker.shutdown)
            if self._engine is not None:
                stack.callback(self._engine.shutdown)

    def withdraw(self) -> None:
        """Release what was published."""
        with ExitStack() as stack:
            while self._senders:
                stack.callback(self._senders.popitem()[1].close)


class HostGroup(ReferringGroup, Protocol):
    """A worker group whose workers may each have an engine attached."""

    def attach_engine(self, factory: AttachedFactory) -> None:
        """Build an engine beside each worker."""
        ...

    def call(self, verb: Verb[P, R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        return self.call_as("backend", verb, *args, **kwargs)

    def scatter(self, verb: ShardVerb[S, P, R], shards: Sequence[S], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        return self.scatter_as("backend", verb, shards, *args, **kwargs)

    def call_as(self, role: Role, verb: Verb[P, R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """``call`` of the objects in a role."""
        ...

    def scatter_as(
        self, role: Role, verb: ShardVerb[S, P, R], shards: Sequence[S], *args: P.args, **kwargs: P.kwargs
    ) -> list[R]:
        """``scatter`` to the objects in a role."""
        ...


class AttachedGroup:
    """The engines attached to the workers of a group, as a group of their own. They live and die with their hosts."""

    def __init__(self, hosts: HostGroup) -> None:
        self._hosts = hosts

    @property
    def data_parallel_size(self) -> int:
        return self._hosts.data_parallel_size

    def call(self, verb: Verb[P, R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        return self._hosts.call_as("engine", verb, *args, **kwargs)

    def scatter(self, verb: ShardVerb[S, P, R], shards: Sequence[S], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        return self._hosts.scatter_as("engine", verb, shards, *args, **kwargs)

    def submit(self, rank: int, verb: Verb[P, Future[R]], *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        raise BackendError(
            "engines in a trainer's processes answer calls of all ranks alone", fix="use an engine of its own, e.g. hf"
        )

    def publish(
        self, transport: str, version: int, form: Form = "model", digested: Digested | None = None
    ) -> WeightHandle:
        return self._hosts.publish(transport, version, form, digested)

    def shutdown(self) -> None:
        """Nothing: the hosts shut their engines down."""


@dataclass(frozen=True)
class TrainingFactory:
    """Builds one rank of the training policy, or of an auxiliary model, in its worker process."""

    policy: PolicyConfig
    reference: bool = False
    head: Head = "language_model"

    def __call__(self, context: WorkerContext) -> TrainingBackend:
        return self.policy.backend.build(self.policy, context, reference=self.reference, head=self.head)
