"""Nodes that the cluster is about to take away, and the places of a run that are on them.

A node drains when its machine is wanted back: a spot instance's notice, ``ray drain-node``, an autoscaler. Ray puts
nothing new on it, and it goes once it is idle or its time is over. So its workers have to leave by themselves.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import ray

from nemorl.contracts import WorkerGroup
from nemorl.errors import DeadlineError
from nemorl.resources.ray_cluster import RayVirtualCluster
from nemorl.resources.ray_workers import RayWorkerGroup

LOOK_S = 5.0
"""Seconds between two looks at the nodes, at the earliest: each is a question to the GCS of about 2 ms."""
WAIT_S = 0.2
"""Seconds between two looks at places that were asked for."""


class DrainWatch:
    """Looks for nodes that drain under the places of a run."""

    def __init__(self, clusters: Sequence[RayVirtualCluster]) -> None:
        """
        Args:
            clusters: The places of the run, each once.
        """
        self._clusters = clusters
        self._next_s = time.monotonic() + LOOK_S

    def drained_nodes(self) -> list[str]:
        """Nodes that drain and have workers of the run. Places elsewhere are asked for at the same time.

        Empty, too, if the nodes were looked at a moment ago.
        """
        if time.monotonic() < self._next_s:
            return []
        self._next_s = time.monotonic() + LOOK_S
        leaving = draining_nodes()
        if leaving is None:
            return []
        below = {node for cluster in self._clusters for node in cluster.ask_elsewhere(leaving)}
        return [name for node, name in leaving.items() if node in below]

    @property
    def is_room_elsewhere(self) -> bool:
        """All places that were asked for are there."""
        return all(cluster.is_room_elsewhere for cluster in self._clusters)

    def take_fresh_places(self) -> None:
        """Workers that start from now on start on the places that were asked for, which are there."""
        for cluster in self._clusters:
            cluster.take_fresh_places()

    def leave_old_places(self) -> None:
        """Give back the places that others were taken for."""
        for cluster in self._clusters:
            cluster.leave_old_places()

    @staticmethod
    def is_displaced(group: WorkerGroup) -> bool:
        """Some worker of a group is not where it would start now."""
        assert isinstance(group, RayWorkerGroup), "the group was made by another launcher"
        return group.is_displaced

    @staticmethod
    def retire(group: WorkerGroup) -> None:
        """End the workers of a group that are displaced, for ``restart`` to replace."""
        assert isinstance(group, RayWorkerGroup), "the group was made by another launcher"
        group.retire()


def settle(cluster: RayVirtualCluster) -> None:
    """Before workers of a cluster start anew: none of its places is on a node that drains, where Ray starts nothing.

    Raises:
        DeadlineError: There are no others.
    """
    limit_s = cluster.config.placement_timeout_s
    deadline_s = time.monotonic() + limit_s
    leaving = draining_nodes()
    while leaving is not None and cluster.ask_elsewhere(leaving) and not cluster.is_room_elsewhere:
        if time.monotonic() > deadline_s:
            raise DeadlineError(
                f"waited {limit_s:.0f} s for places beside those on {', '.join(leaving.values())}, which the "
                "cluster is about to take away",
                fix="let another node join the cluster, and start the same command again: it continues from the "
                "last checkpoint; or raise cluster.placement_timeout_s",
            )
        time.sleep(WAIT_S)
        leaving = draining_nodes()
    if cluster.is_room_elsewhere:
        cluster.take_fresh_places()
    cluster.ask_no_more()  # who drained has gone, and Ray seeks other nodes for the places there


def draining_nodes() -> dict[str, str] | None:
    """The nodes that drain: their names in messages, by id. ``None``: the cluster does not say."""
    from ray.autoscaler.v2.sdk import get_cluster_status

    try:
        status = get_cluster_status(ray.get_runtime_context().gcs_address)
    except Exception:  # of any kind, while the GCS is away; who needs it will say so
        return None
    nodes = [*status.active_nodes, *status.idle_nodes]
    return {node.node_id: f"{node.ip_address} ({node.node_id[:8]})" for node in nodes if node.node_status == "DRAINING"}
