"""Each transport's account of itself, readable where torch and Ray are absent."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar

from nemorl.errors import ConfigIssue
from nemorl.plugins.kinds import WeightTransportConfig
from nemorl.weights import Distance
from pydantic import Field

if TYPE_CHECKING:
    from nemorl.config.cluster import ClusterConfig
    from nemorl.contracts import WeightTransport


class SharedMemoryConfig(WeightTransportConfig):
    """One copy into memory that both processes map."""

    summary: ClassVar[str] = "One copy into memory that both sides map (one node, Linux)"
    reach: ClassVar[Distance] = "node"
    reaches_subprocesses: ClassVar[bool] = True
    is_mapped: ClassVar[bool] = True

    def build(self) -> WeightTransport:
        from nemorl_rl.transports.shared_memory import SharedMemory

        return SharedMemory()


class ObjectStoreConfig(WeightTransportConfig):
    """Through Ray's object store, between any nodes."""

    summary: ClassVar[str] = "Ray's object store (any nodes; on one node receivers map it)"
    reach: ClassVar[Distance] = "cluster"

    def build(self) -> WeightTransport:
        from nemorl_rl.transports.object_store import ObjectStore

        return ObjectStore()


class CudaIpcConfig(WeightTransportConfig):
    """One copy within the trainer's GPU, which other processes of the node map."""

    summary: ClassVar[str] = "GPU memory that other processes map (GPUs of one node)"
    reach: ClassVar[Distance] = "node"
    devices: ClassVar[frozenset[str] | None] = frozenset({"cuda"})
    reaches_subprocesses: ClassVar[bool] = True
    takes_device_memory: ClassVar[bool] = True
    is_mapped: ClassVar[bool] = True

    def build(self) -> WeightTransport:
        from nemorl_rl.transports.cuda_ipc import CudaIpc

        return CudaIpc()


class NcclConfig(WeightTransportConfig):
    """Broadcast from the trainer's GPU to every generator's, bucket by bucket."""

    summary: ClassVar[str] = "Broadcast between GPUs (any nodes, generation on devices of its own)"
    reach: ClassVar[Distance] = "cluster"
    devices: ClassVar[frozenset[str] | None] = frozenset({"cuda"})
    works_colocated: ClassVar[bool] = False
    reaches_subprocesses: ClassVar[bool] = True

    deadline_s: float = Field(120.0, gt=0)
    """Longest wait of the trainer for a receiver, in seconds: to join a broadcast, and to take each bucket. A receiver
    waits three times as long for the trainer."""

    def build(self) -> WeightTransport:
        from nemorl_rl.transports.broadcast import Broadcast

        return Broadcast(self.deadline_s)


class DeltaSocketConfig(WeightTransportConfig):
    """What has changed since the last version, over TCP."""

    summary: ClassVar[str] = "Only the bits that have changed, over TCP (any nodes)"
    reach: ClassVar[Distance] = "cluster"
    # Every process that fetches keeps a copy of the weights: the processes of an engine are to share one on each node.
    reaches_subprocesses: ClassVar[bool] = False

    deadline_s: float = Field(120.0, gt=0)
    """Longest wait of either side for the other's next bytes, in seconds."""

    def build(self) -> WeightTransport:
        from nemorl_rl.transports.delta.socket import DeltaSocket

        return DeltaSocket(self.deadline_s)


class PlacedTransportConfig(WeightTransportConfig):
    """One that is told by variables of the trainer's processes in which folder it works: transports have no options."""

    variables: ClassVar[tuple[str, ...]] = ()
    """Their names."""

    @classmethod
    def place_problems(cls, cluster: ClusterConfig) -> Iterator[ConfigIssue]:
        """Variables that a run with this cluster lacks."""
        for name in cls.variables:
            if name not in cluster.env_vars and name not in os.environ:
                yield ConfigIssue(
                    "cluster.weight_transport",
                    f"{cluster.weight_transport} needs {name}, which is unset: a folder that trainer and engines share",
                    "set it in cluster.env_vars, or in the shell that starts the run",
                    here=True,
                )


class DeltaFolderConfig(PlacedTransportConfig):
    """What has changed since the last version, as files of a shared folder."""

    summary: ClassVar[str] = "Only the bits that have changed, as files of a shared folder (any nodes)"
    reach: ClassVar[Distance] = "cluster"
    reaches_subprocesses: ClassVar[bool] = False  # as of delta_socket
    variables: ClassVar[tuple[str, ...]] = ("NEMORL_WEIGHTS_FOLDER",)

    deadline_s: float = Field(120.0, gt=0)
    """Longest wait of an engine for weights that it asks for, in seconds."""

    def build(self) -> WeightTransport:
        from nemorl_rl.transports.delta.folder import DeltaFolder

        return DeltaFolder(self.deadline_s)
