"""Engines of a fleet on the trainer's devices: where they are, and when they are in its memory."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import groupby

from nemorl.config.cluster import ClusterConfig
from nemorl.contracts import SleepingBackend, WorkerGroup
from nemorl.contracts.memory import MemoryPart
from nemorl.resources.ray_cluster import Place, RayVirtualCluster

from nemorl_rl.placement.fleet import EngineFleet
from nemorl_rl.placement.tenants import EngineTenant, Parts, fullest

ALL: Parts = ("weights", "cache")


@dataclass(frozen=True)
class LentPlaces:
    """Places of the trainer for one engine: it is where they are, and stays and goes with them."""

    owner: RayVirtualCluster
    first: int
    world_size: int
    share: float
    """Of each place; the owner's groups have the others"""

    @classmethod
    def of(cls, owner: RayVirtualCluster, width: int, share: float) -> list[LentPlaces]:
        """As many as there are on the owner's nodes with ``width`` places each."""
        found = []
        for _, places in groupby(range(owner.world_size), lambda index: owner.places[index].node):
            on_node = [*places]
            found += [cls(owner, first, width, share) for first in on_node[: len(on_node) // width * width : width]]
        return found

    @property
    def places(self) -> list[Place]:
        return self.owner.places[self.first : self.first + self.world_size]

    @property
    def config(self) -> ClusterConfig:
        return self.owner.config

    @property
    def bundle(self) -> Mapping[str, float]:
        return self.owner.bundle

    def gpus_of(self, places: Sequence[Place], share: float) -> tuple[str, ...]:
        return self.owner.gpus_of(places, share)

    @property
    def is_there(self) -> bool:
        return self.owner.is_there

    def is_on(self, nodes: Collection[str]) -> bool:
        """Never: who looks would leave such nodes, and the owner decides that."""
        return False

    def shutdown(self) -> None:
        """They are the owner's."""


class LentEngines:
    """Tenant of the trainer's devices, and host of the engines there. One that is lost comes back between two phases,
    with what the others have in memory then.
    """

    def __init__(self, fleet: EngineFleet, turn: Callable[[], AbstractContextManager[None]]) -> None:
        """
        Args:
            fleet: Of which some are there.
            turn: Within it an engine has room to start.
        """
        self._fleet, self.turn = fleet, turn
        self._present: Parts = ALL

    def keep(self, parts: Parts) -> None:
        self._present = parts
        self._fleet.call_lent(SleepingBackend.sleep, 1)
        if parts:
            self._fleet.call_lent(SleepingBackend.wake, list(parts))

    def forget(self) -> None:
        self._present = ()
        self._fleet.call_lent(SleepingBackend.sleep, 2)

    def bring(self, parts: Parts) -> None:
        self._present = (*self._present, *parts)
        self._fleet.call_lent(SleepingBackend.wake, list(parts))

    def held_bytes(self) -> Mapping[MemoryPart, int]:
        return fullest(self._fleet.call_lent(SleepingBackend.held_bytes))

    def settle(self, workers: WorkerGroup) -> None:
        if self._present != ALL:
            EngineTenant(workers).keep(self._present)
