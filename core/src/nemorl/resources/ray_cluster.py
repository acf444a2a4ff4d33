"""RayVirtualCluster: devices on nodes, reserved together, so that worker groups can be put on them.

Each node's places are one placement group that Ray must fit onto a single machine. A request that the cluster can
never satisfy is refused at once with what there is; one that waits for other jobs has a deadline.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any, Protocol, Self

import ray
from ray.exceptions import RayError
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from nemorl.config.cluster import ClusterConfig
from nemorl.errors import DeadlineError, ResourceError
from nemorl.resources.neighbours import neighbours_first
from nemorl.resources.ray_session import RaySession

MOMENT_S = 1
"""Time in which Ray reserves places that are free. It counts whole seconds; within none it denies an eighth of them."""


@dataclass(frozen=True, slots=True)
class Place:
    """One reserved device: where a worker can be put."""

    node: int
    group: Any
    """Ray's placement group of the node."""
    index: int
    """Position within it."""

    @property
    def strategy(self) -> PlacementGroupSchedulingStrategy:
        return PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=self.index)


class Places(Protocol):
    """Where the workers of a group are put, and the share of each place that an engine there reserves."""

    @property
    def config(self) -> ClusterConfig: ...
    @property
    def bundle(self) -> Mapping[str, float]: ...
    @property
    def places(self) -> list[Place]: ...
    @property
    def share(self) -> float: ...
    @property
    def world_size(self) -> int: ...

    def gpus_of(self, places: Sequence[Place], share: float) -> tuple[str, ...]: ...


class RayVirtualCluster:
    """Reserved places for workers, node by node.

    Example:
        >>> cluster = RayVirtualCluster([8, 8])  # two nodes with eight GPUs each  # doctest: +SKIP
        >>> workers = RayWorkerGroup(cluster, MyWorker)  # doctest: +SKIP
        >>> cluster.shutdown()  # doctest: +SKIP
    """

    share = 1.0

    def __init__(
        self,
        workers_per_node: Sequence[int],
        config: ClusterConfig | None = None,
        *,
        devices_per_worker: int = 1,
        role: str = "",
    ) -> None:
        """
        Args:
            workers_per_node: Places on each node.
            config: Devices of a place, deadlines, address. Unset: this machine's.
            devices_per_worker: Devices of one place.
            role: Its places are on nodes with the resource ``nemorl_<role>``, where the cluster has any.

        Raises:
            ResourceError: the cluster is too small, whoever else uses it.
            DeadlineError: others held the devices for longer than ``placement_timeout_s``.
        """
        self.config = config or ClusterConfig(launcher="ray")
        self._session = RaySession(self.config)
        self._groups: list[Any] = []
        self._fresh: dict[int, Any] = {}
        """Places asked for in place of those on nodes that drain, by node."""
        self._left: list[Any] = []
        """Those that were left for them, until the workers there have ended."""
        self.bundle = {"CPU": self.config.cpus_per_worker * devices_per_worker}
        """Resources of one place."""
        if self.config.uses_gpus:
            self.bundle["GPU"] = float(devices_per_worker)
        if any(f"nemorl_{role}" in node["Resources"] for node in _alive()):
            self.bundle[f"nemorl_{role}"] = 0.001
        try:
            self._require_capacity(workers_per_node)
            self._reserve(workers_per_node)
            self._order_by_domain(workers_per_node)
        except BaseException:
            self.shutdown()
            raise
        self._counts = tuple(workers_per_node)
        self.places = self._all_places()

    def _all_places(self) -> list[Place]:
        return [
            Place(node, group, index)
            for node, (group, count) in enumerate(zip(self._groups, self._counts, strict=True))
            for index in range(count)
        ]

    @classmethod
    def single_places(cls, count: int, config: ClusterConfig, *, devices_per_worker: int, role: str) -> list[Self]:
        """``count`` clusters of one place each, on any nodes: each can be given back without the others.

        Raises:
            ResourceError: as the constructor, for all of them together.
            DeadlineError: as the constructor.
        """
        found: list[Self] = []
        with ExitStack() as undo:
            while len(found) < count:
                found.append(cls([1], config, devices_per_worker=devices_per_worker, role=role))
                undo.callback(found[-1].shutdown)
                if sum(capacity := found[0]._capacity()) < count:
                    raise found[0]._too_small([count], capacity)
            undo.pop_all()
        return found

    @property
    def is_there(self) -> bool:
        """Whether all places are on nodes that are alive. Ray looks for other nodes in place of lost ones."""
        with suppress(RayError):
            return all(placement_group_table(group).get("state") == "CREATED" for group in self._groups)
        return False

    def is_on(self, nodes: Collection[str]) -> bool:
        """Whether some places are on one of these nodes, by id."""
        return any(_home(group) in nodes for group in self._groups)

    @property
    def world_size(self) -> int:
        return len(self.places)

    def gpus_of(self, places: Sequence[Place], share: float) -> tuple[str, ...]:
        """Ids of the GPUs of places on one node, asked from each; none on the CPU.

        Args:
            places: Of this cluster.
            share: Fraction of each that is free.
        """
        if not self.config.uses_gpus:
            return ()
        amounts = {"num_cpus": 0, "num_gpus": self.bundle["GPU"] * share}
        ask = ray.remote(_own_gpus)
        asked = [ask.options(scheduling_strategy=place.strategy, **amounts).remote() for place in places]
        return tuple(gpu for found in ray.get(asked, timeout=self.config.placement_timeout_s) for gpu in found)

    def ask_elsewhere(self, leaving: Collection[str]) -> set[str]:
        """Ask for places beside those on nodes that are about to go; Ray puts none on such a node.

        Args:
            leaving: Ids of all such nodes.

        Returns:
            Those of them that have places of this cluster, or had them and still have workers.
        """
        homes = [_home(group) for group in self._groups]
        for node, home in enumerate(homes):
            if home in leaving and node not in self._fresh:
                self._fresh[node] = placement_group([self.bundle] * self._counts[node], strategy="STRICT_PACK")
            elif home and home not in leaving and node in self._fresh:  # its node went, and Ray has found another
                _remove([self._fresh.pop(node)])
        held = [group for group in self._left if _home(group) in leaving]  # else its node went, with the workers
        _remove([group for group in self._left if group not in held])
        self._left = held
        return {*homes, *map(_home, held)} & {*leaving}

    @property
    def is_room_elsewhere(self) -> bool:
        """The places that were asked for are reserved, now or in a moment."""
        return all(group.wait(MOMENT_S) for group in self._fresh.values())

    def take_fresh_places(self) -> None:
        """Have the places that were asked for: ``is_room_elsewhere``. ``leave_old_places`` gives the others back."""
        if self._fresh:
            self._left += [self._groups[node] for node in self._fresh]
            for node, group in self._fresh.items():
                self._groups[node] = group
            self._fresh = {}
            self.places = self._all_places()

    def ask_no_more(self) -> None:
        """Give back the places that were asked for and not taken."""
        _remove([*self._fresh.values()])
        self._fresh = {}

    def leave_old_places(self) -> None:
        """Give back the places that others were taken for. Workers there end."""
        _remove(self._left)
        self._left = []

    def shutdown(self) -> None:
        """Give the places back, and end the private cluster if this one began it."""
        self.ask_no_more()
        self.leave_old_places()
        _remove(self._groups)
        self._groups = []
        self._session.close()

    def _require_capacity(self, workers_per_node: Sequence[int]) -> None:
        capacity, asked = self._capacity(), sorted(workers_per_node, reverse=True)
        fits = all(count <= room for count, room in zip(asked, capacity, strict=False))
        if not fits or len(asked) > len(capacity):
            raise self._too_small(asked, capacity)

    def _capacity(self) -> list[int]:
        """Places that each node could hold if it were empty, the largest first."""
        return sorted((self._fits(node["Resources"]) for node in _alive()), reverse=True)

    def _too_small(self, asked: Sequence[int], capacity: Sequence[int]) -> ResourceError:
        nodes = "; ".join(f"{node['NodeManagerHostname']}: {_amounts(node['Resources'])}" for node in _alive())
        return ResourceError(
            f"asked for {_shape(asked)} with {_amounts(self.bundle)} each; the cluster has {nodes}, "
            f"which holds {_shape([room for room in capacity if room] or [0])}",
            fix="lower cluster.num_nodes, gpus_per_node, workers_per_node or cpus_per_worker, or join a larger cluster "
            "with cluster.address",
        )

    def _fits(self, resources: dict[str, float]) -> int:
        return min(int(resources.get(name, 0.0) / amount + 1e-9) for name, amount in self.bundle.items())

    def _reserve(self, workers_per_node: Sequence[int]) -> None:
        deadline = time.monotonic() + self.config.placement_timeout_s
        for count in workers_per_node:
            self._groups.append(placement_group([self.bundle] * count, strategy="STRICT_PACK"))
        for node, group in enumerate(self._groups):
            if not group.wait(max(MOMENT_S, deadline - time.monotonic())):
                raise DeadlineError(
                    f"waited {self.config.placement_timeout_s:.0f} s for {workers_per_node[node]} places with "
                    f"{_amounts(self.bundle)} on one node; the whole cluster has free: "
                    f"{_amounts(ray.available_resources())}",  # type: ignore[no-untyped-call]
                    fix="end the jobs that hold the devices (`ray status` lists them), ask for fewer, or raise "
                    "cluster.placement_timeout_s",
                )

    def _order_by_domain(self, workers_per_node: Sequence[int]) -> None:
        """Give neighbouring ranks to nodes of one domain, among nodes with as many workers."""
        where = {node["NodeID"]: list(node["Resources"]) for node in _alive()}
        homes = [where.get(placement_group_table(group)["bundles_to_node_id"][0], []) for group in self._groups]
        for count in set(workers_per_node):
            same = [node for node, workers in enumerate(workers_per_node) if workers == count]
            order = [self._groups[same[place]] for place in neighbours_first([homes[node] for node in same])]
            for node, group in zip(same, order, strict=True):
                self._groups[node] = group


def _remove(groups: Sequence[Any]) -> None:
    for group in groups if ray.is_initialized() else ():
        with suppress(RayError):  # the cluster itself is lost
            remove_placement_group(group)


def _home(group: Any) -> str:
    """The id of the node that holds all places of a group; empty while Ray looks for one."""
    table = placement_group_table(group)
    return table["bundles_to_node_id"][0] if table.get("state") == "CREATED" else ""


def _own_gpus() -> list[str]:
    """Of the process that runs this."""
    found: list[str] = ray.get_runtime_context().get_accelerator_ids()["GPU"]
    return found


def _alive() -> list[dict[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]


def _amounts(resources: dict[str, float]) -> str:
    shown = [name for name in sorted({"CPU", *resources}) if name in ("CPU", "GPU") or name.startswith("nemorl_")]
    return ", ".join(f"{resources.get(name, 0.0):g} {name}" for name in shown)


def _shape(counts: Sequence[int]) -> str:
    """``2 nodes with 8 workers``, ``2 nodes with 8, 4 workers``."""
    nodes = "1 node" if len(counts) == 1 else f"{len(counts)} nodes"
    each = ", ".join(map(str, sorted(set(counts), reverse=True)))
    return f"{nodes} with {each} worker{'' if each == '1' else 's'}"
