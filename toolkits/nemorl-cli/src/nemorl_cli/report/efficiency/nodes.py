"""Readings of every node of a run: of the driver's by a thread here, of each other one by a process there.

On Ray, a node that holds workers of the run and is not the driver's gets one actor, which reserves nothing. It is asked
without waiting: what it has read comes with a later step.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nemorl_cli.report.efficiency.machine import Machine, Reading
from nemorl_cli.report.efficiency.sampler import Sampler

if TYPE_CHECKING:
    from nemorl.contracts import WorkerGroup

HERE = 0
"""Number of the driver's node."""


class Watcher:
    """Body of the actor on another node."""

    def __init__(self, every_s: float, pids: Sequence[int]) -> None:
        self._sampler = Sampler(Machine(lambda: pids), every_s=every_s)
        self._sampler.start()

    def take(self) -> list[Reading]:
        return self._sampler.take()


class Nodes:
    """The nodes of one run."""

    def __init__(self, trainer: Any, *, every_s: float) -> None:
        """
        Args:
            trainer: Of a run that is built.
            every_s: Seconds between two readings of a node.
        """
        self._groups = _ray_groups(trainer)
        self._warn: Callable[[str], None] = trainer.run.warn
        machine = Machine(self._own_pids, trainer.run.path, self._warn)
        self._here = Sampler(machine, every_s=every_s)
        self._here.start()
        self._actors: dict[int, Any] = {}
        self._asked: dict[int, Any] = {}
        """Answers under way, by number of the node"""
        if self._groups:
            self._watch_others(every_s)

    def take(self) -> dict[int, list[Reading]]:
        """Readings that are there, by number of the node; those of other nodes are of a step or more before."""
        found = {HERE: self._here.take(), **self._answers()}
        for number, actor in self._actors.items():
            if number not in self._asked:
                self._asked[number] = actor.take.remote()
        return {number: readings for number, readings in found.items() if readings}

    def close(self) -> None:
        """End all that was started."""
        self._here.stop()
        if self._actors:
            import ray

            for actor in self._actors.values():
                if ray.is_initialized():
                    ray.kill(actor)
            self._actors = {}

    def _own_pids(self) -> list[int]:
        here = _driver_address() if self._groups else ""
        return [os.getpid(), *(facts.pid for group in self._groups for facts in group.facts if facts.address == here)]

    def _watch_others(self, every_s: float) -> None:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        try:
            for number, (node, pids) in enumerate(other_nodes(self._groups).items(), start=HERE + 1):
                strategy = NodeAffinitySchedulingStrategy(node, soft=False)
                actor = ray.remote(Watcher).options(num_cpus=0, scheduling_strategy=strategy)
                self._actors[number] = actor.remote(every_s, pids)
        except ray.exceptions.RayError as error:
            self._warn(f"other nodes are not watched: {str(error).splitlines()[0]}")

    def _answers(self) -> dict[int, list[Reading]]:
        if not self._asked:
            return {}
        import ray

        ready, _ = ray.wait(list(self._asked.values()), num_returns=len(self._asked), timeout=0)
        found: dict[int, list[Reading]] = {}
        for number, answer in list(self._asked.items()):
            if answer not in ready:
                continue
            del self._asked[number]
            try:
                found[number] = ray.get(answer)
            except ray.exceptions.RayError as error:
                del self._actors[number]
                self._warn(f"node {number} is no longer watched: {str(error).splitlines()[0]}")
        return found


def other_nodes(groups: Sequence[Any]) -> Mapping[str, list[int]]:
    """Ids of the nodes that hold workers of these groups, without the driver's, and the workers' processes on each."""
    import ray

    here = _driver_address()
    ids = {node["NodeManagerAddress"]: node["NodeID"] for node in ray.nodes() if node["Alive"]}
    found: dict[str, list[int]] = {}
    for facts in (facts for group in groups for facts in group.facts):
        if facts.address != here and facts.address in ids:
            found.setdefault(ids[facts.address], []).append(facts.pid)
    return found


def _driver_address() -> str:
    import ray

    address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    return address


def _ray_groups(trainer: Any) -> list[Any]:
    """The groups of processes of a run; none where all is in this one."""
    if not trainer.config.cluster.uses_ray:
        return []
    from nemorl.resources.ray_workers import RayWorkerGroup
    from nemorl_rl.placement.fleet import EngineFleet

    policies = [trainer.run.policy, *trainer.run.auxiliary_models.values()]
    if trainer.config.sampler is not None:
        policies.append(trainer.generation)
    groups: list[WorkerGroup] = [policy.workers for policy in policies]
    return [group for group in groups if isinstance(group, RayWorkerGroup | EngineFleet)]
