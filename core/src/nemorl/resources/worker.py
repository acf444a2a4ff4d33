"""What runs in a worker process: one backend, perhaps a guest beside it, and how its weights leave the process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemorl.weights import WeightHandle, transport

if TYPE_CHECKING:
    from nemorl.contracts import WorkerGroup


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


WorkerFactory = Callable[[WorkerContext], Any]
"""Builds the object that a worker process holds: a class, or a picklable function. It runs inside the process."""

GuestFactory = Callable[[Any, WorkerContext], Any]
"""Builds an object that lives in another one's process, given that one: an engine over a trainer's own weights."""


class WorkerHost:
    """The object of one rank, and the sending end of its weights."""

    def __init__(self, factory: WorkerFactory, context: WorkerContext) -> None:
        self.worker = factory(context)
        self._context = context
        self._guest: Any = None
        self._senders: dict[str, Any] = {}

    def admit(self, factory: GuestFactory) -> None:
        """Build a guest beside the object."""
        self._guest = factory(self.worker, self._context)

    def call(self, method: str, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        """One method of the object, or of its guest: ``guest.generate``."""
        owner, _, name = method.rpartition(".")
        return getattr(self._guest if owner else self.worker, name)(*args, **(kwargs or {}))

    def publish(self, name: str, version: int) -> WeightHandle | None:
        """The weights under ``version``, over the transport ``name``. Collective: rank 0 returns the handle."""
        if self._context.rank > 0:
            for _ in self.worker.export_weights():
                pass
            return None
        if name not in self._senders:
            self._senders[name] = transport(name)
        return WeightHandle(name, version, self._senders[name].publish(self.worker.export_weights))

    def shutdown(self) -> None:
        """Shut the guest and the object down, and release what was published."""
        if self._guest is not None:
            self._guest.shutdown()
        self.worker.shutdown()
        for sender in self._senders.values():
            sender.close()
        self._senders = {}


class GuestGroup:
    """The guests of a group's workers, as a group of their own. They live and die with their hosts."""

    def __init__(self, hosts: WorkerGroup) -> None:
        self._hosts = hosts

    @property
    def data_parallel_size(self) -> int:
        return self._hosts.data_parallel_size

    def call(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        return self._hosts.call(f"guest.{method}", *args, **kwargs)

    def scatter(self, method: str, shards: Sequence[tuple[Any, ...]]) -> list[Any]:
        return self._hosts.scatter(f"guest.{method}", shards)

    def publish(self, transport: str, version: int) -> WeightHandle:
        return self._hosts.publish(transport, version)

    def shutdown(self) -> None:
        """Nothing: the hosts shut their guests down."""
