"""Each transport's account of itself, readable where torch and Ray are absent."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from nemorl.plugins.kinds import WeightTransportConfig
from nemorl.weights import Distance
from pydantic import Field

if TYPE_CHECKING:
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
