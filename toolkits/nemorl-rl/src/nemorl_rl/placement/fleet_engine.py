"""One engine of a fleet: its devices, its process, and what became of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from nemorl.contracts import WorkerGroup
from nemorl.errors import NemorlError
from nemorl.resources.worker import WorkerFactory
from nemorl.weights import WeightHandle

State = Literal["starting", "ready", "leaving", "lost", "given_up"]
"""``leaving``: finishes what it has and gets no more. ``given_up``: it died so often that it is not started again."""


class Devices(Protocol):
    """The devices of one engine."""

    @property
    def is_there(self) -> bool:
        """Whether their node is alive."""
        ...

    def is_on(self, nodes: Collection[str]) -> bool:
        """Whether their node is one of these."""
        ...

    def shutdown(self) -> None:
        """Give them back."""
        ...


class Starter(Protocol):
    """Starts engines, each as a group of one (``nemorl.resources.ray_launcher``)."""

    def reserve_engine(self, wait_s: float) -> Devices:
        """Devices of one engine.

        Raises:
            ResourceError: There are none.
            DeadlineError: Others held them for longer than ``wait_s``.
        """
        ...

    def start_engine(self, devices: Any, factory: WorkerFactory, name: str, number: int) -> WorkerGroup:
        """An engine on them."""
        ...

    def leaving_nodes(self) -> Collection[str]:
        """Nodes that the cluster is about to take away, on which nothing new starts."""
        ...

    def restart(self, group: WorkerGroup, factory: WorkerFactory | None = None) -> None:
        """Start a lost one again, where it was."""
        ...


class Host(Protocol):
    """The trainer, on whose devices engines sample while it has nothing to do."""

    def turn(self) -> AbstractContextManager[None]:
        """Within it an engine has room to start."""
        ...

    def settle(self, workers: WorkerGroup) -> None:
        """An engine has started: it keeps in memory what others of its kind have there."""
        ...


@dataclass(frozen=True)
class Source:
    """What engines of a fleet are built from."""

    starter: Starter
    name: str
    """Of them all, for messages and log files"""
    factory: Callable[[WeightHandle | None], WorkerFactory]
    """Builds one with these weights."""
    newest: Callable[[], WeightHandle | None]
    """The newest weights."""

    @contextmanager
    def building(self, host: Host | None) -> Iterator[WeightHandle | None]:
        """The newest weights, and room for engines of this host to start from them."""
        with nullcontext() if host is None else host.turn():
            yield self.newest()

    def build(self, engine: Engine, weights: WeightHandle | None) -> None:
        """Start the process of an engine, or the one in a lost one's place."""
        factory = self.factory(weights)
        if engine.group is None:
            engine.group = self.starter.start_engine(engine.devices, factory, self.name, engine.number)
        else:
            self.starter.restart(engine.group, factory)
        if engine.host is not None:
            engine.host.settle(engine.workers)


@dataclass(eq=False)
class Engine:
    """One engine, through all its processes."""

    number: int
    devices: Devices
    host: Host | None = None
    """Of an engine on the trainer's devices"""
    state: State = "starting"
    group: WorkerGroup | None = None
    """Unset: it has not been built yet"""
    in_progress: int = 0
    """Calls that it has"""
    served: int = 0
    """Requests that it has answered"""
    lost: int = 0
    """Times that its process died"""
    start_s: float | None = None
    """Seconds that its last start took, weights included"""
    trouble: str = ""
    retry_at: float = 0.0
    """Moment of ``time.monotonic()`` before which a lost one is not looked at"""
    heir: Engine | None = None
    """Started elsewhere because its node is about to go: it leaves once that one is ready"""
    retries: deque[float] = field(default_factory=deque)
    """Moments at which it was started again"""

    @property
    def name(self) -> str:
        return f"engine-{self.number}"

    @property
    def workers(self) -> WorkerGroup:
        """Its process, as a group of one."""
        assert self.group is not None, "it gets work once it is built"
        return self.group

    def end(self) -> None:
        """End its process and give its devices back. Never raises."""
        if self.group is not None:
            self.group.shutdown()
        self.devices.shutdown()

    def as_json(self) -> dict[str, Any]:
        """What ``nemorl engines list`` shows of it."""
        return {
            "name": self.name,
            "state": self.state,
            "lent": self.host is not None,
            "in_progress": self.in_progress,
            "served": self.served,
            "lost": self.lost,
            "start_s": None if self.start_s is None else round(self.start_s, 2),
            "trouble": self.trouble,
        }


def first_line(error: NemorlError) -> str:
    """What happened, without the last words of a log."""
    return error.message.partition("\n")[0].removesuffix("; its last output:")
