"""Engines that start, work and die as a test says, on a yard with so many devices."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from typing import Any

from nemorl.errors import ResourceError, WorkerLostError
from nemorl.types import GenerationRequest
from nemorl.weights import WeightHandle
from nemorl_rl.placement.fleet import EngineFleet
from nemorl_rl.placement.fleet_engine import Source

WAIT_S = 30.0


def handle(version: int) -> WeightHandle:
    return WeightHandle("in_process", version, None)


class Sampler:
    """Answers each request with the version of its weights, once it may."""

    def __init__(self, weights: WeightHandle) -> None:
        self.version = weights.version
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.has_work = threading.Event()
        self.answered = 0
        self.waiting: list[Future[Any]] = []

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Any]:
        self.has_work.set()
        assert self.may_answer.wait(WAIT_S)
        self.answered += len(requests)
        return [[(request.token_ids, self.version)] for request in requests]

    def submit(self, request: GenerationRequest) -> Future[Any]:
        self.waiting.append(Future())
        self.has_work.set()
        return self.waiting[-1]

    def update_weights(self, weights: WeightHandle, version: int) -> int:
        self.version = version
        return 8


class Process:
    """A group of one, which can be killed: who waits for it is told."""

    def __init__(self, number: int, sampler: Any) -> None:
        self.number, self.sampler, self.is_dead, self.is_shut = number, sampler, False, False
        self.data_parallel_size = 1

    def call(self, verb: Any, *args: Any, **kwargs: Any) -> list[Any]:
        self._require_alive()
        found = getattr(self.sampler, verb.__name__)(*args, **kwargs)
        self._require_alive()
        return [found]

    def scatter(self, verb: Any, shards: Sequence[Any], *args: Any, **kwargs: Any) -> list[Any]:
        return self.call(verb, shards[0], *args, **kwargs)

    def submit(self, rank: int, verb: Any, *args: Any) -> Any:
        self._require_alive()
        return verb(self.sampler, *args)

    def kill(self) -> None:
        self.is_dead = True
        self.sampler.may_answer.set()
        for future in self.sampler.waiting:
            if not future.done():
                future.set_exception(self._error())

    def shutdown(self) -> None:
        self.is_shut = True

    def _require_alive(self) -> None:
        if self.is_dead:
            raise self._error()

    def _error(self) -> WorkerLostError:
        return WorkerLostError(f"engine rank {self.number} died", fix="see its log")


class Bay:
    """The devices of one engine."""

    def __init__(self, yard: Yard) -> None:
        self.yard, self.is_there, self.is_free = yard, True, False
        self.node = f"node-{len(yard.bays)}"

    def is_on(self, nodes: Collection[str]) -> bool:
        return self.node in nodes

    def shutdown(self) -> None:
        self.yard.free += not self.is_free
        self.is_free = True


class Yard:
    """A ``Starter`` with so many devices."""

    def __init__(self, devices: int) -> None:
        self.free = devices
        self.leaving: list[str] = []
        self.bays: list[Bay] = []
        self.processes: list[Process] = []
        self.newest = handle(1)
        self.before_build: Callable[[], None] = lambda: None
        """Runs while an engine starts."""
        self.wraps: Callable[[Sampler], Any] = lambda sampler: sampler
        self.said: list[str] = []

    def leaving_nodes(self) -> Collection[str]:
        return self.leaving

    def reserve_engine(self, wait_s: float) -> Bay:
        if not self.free:
            raise ResourceError("no device is free", fix="wait")
        self.free -= 1
        self.bays.append(Bay(self))
        return self.bays[-1]

    def start_engine(self, devices: Any, factory: Any, name: str, number: int) -> Any:
        self.before_build()
        process = Process(number, self.wraps(factory(None)))
        self.processes.append(process)
        return process

    def restart(self, group: Any, factory: Any = None) -> None:
        self.before_build()
        group.sampler, group.is_dead = self.wraps(factory(None)), False

    def fleet(self, size: int, **options: Any) -> EngineFleet:
        def factory(weights: WeightHandle | None) -> Any:
            assert weights is not None
            return lambda _: Sampler(weights)

        source = Source(self, "engine", factory, lambda: self.newest)
        settings = {"max_restarts": 3, "restart_window_s": 3600.0, "patience_s": WAIT_S, **options}
        fleet = EngineFleet(source, warn=self.said.append, remark=self.said.append, **settings)
        fleet.start(size)
        return fleet
