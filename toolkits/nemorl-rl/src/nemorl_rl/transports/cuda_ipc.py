"""The transport ``cuda_ipc``: the trainer's GPU memory, mapped by other processes of the node. No byte leaves the GPU.

Each bucket is copied once within the trainer's GPU and handed over as a CUDA IPC handle. A receiver on the same GPU
reads it in place. One on another GPU reads through peer access and keeps a copy: the trainer's GPU need not be among
those it sees (Ray shows each worker its own), for CUDA maps memory of hidden peers too, as NCCL does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nemorl.errors import BackendError
from nemorl.weights import Export

from nemorl_rl.transports.layout import Slots, pack, unpack

if TYPE_CHECKING:
    from torch import Tensor

KEPT_VERSIONS = 2
"""The newest and the one before, which may still be in use."""
DEVICE_ARGUMENT = 6
"""Position of the device's number among the arguments of ``rebuild_cuda_tensor``: the sender's, unknown here."""


@dataclass(frozen=True, slots=True)
class IpcPayload:
    """Handles to the buckets of one version."""

    gpu: str
    """UUID of the GPU that they lie on: numbers differ between processes."""
    buckets: tuple[tuple[tuple[Any, ...], Slots], ...]
    """For each bucket the arguments of ``rebuild_cuda_tensor``, and where its tensors lie."""


class CudaIpc:
    """Either end (see ``WeightTransport``)."""

    def __init__(self) -> None:
        self._kept: deque[list[Tensor]] = deque()

    def publish(self, export: Export) -> IpcPayload:
        import torch
        from torch.multiprocessing.reductions import reduce_tensor

        while len(self._kept) >= KEPT_VERSIONS:
            self._kept.popleft()
            torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]
        packed = [pack(bucket) for bucket in export() if bucket]
        devices = {flat.device for flat, _ in packed}
        if len(devices) != 1 or next(iter(devices)).type != "cuda":
            where = ", ".join(sorted(str(device) for device in devices)) or "nowhere"
            raise BackendError(
                f"cuda_ipc hands over the memory of one GPU; the exported weights are on {where}",
                fix="export the weights from one GPU, or leave cuda_ipc out of the backend's weight_transports",
            )
        device = devices.pop()
        torch.cuda.current_stream(device).synchronize()  # receivers read in streams of their own
        self._kept.append([flat for flat, _ in packed])
        buckets = tuple((reduce_tensor(flat)[1], slots) for flat, slots in packed)  # type: ignore[no-untyped-call]
        return IpcPayload(_uuid(device.index), buckets)

    def fetch(self, payload: IpcPayload) -> Iterator[Mapping[str, Tensor]]:
        import torch
        from torch.multiprocessing.reductions import rebuild_cuda_tensor

        own = torch.cuda.current_device()
        visible = {_uuid(index): index for index in range(torch.cuda.device_count())}
        index = visible.get(payload.gpu, own)
        is_own = _uuid(own) == payload.gpu
        for arguments, slots in payload.buckets:
            mapped = (*arguments[:DEVICE_ARGUMENT], index, *arguments[DEVICE_ARGUMENT + 1 :])
            try:
                flat = rebuild_cuda_tensor(*mapped)  # type: ignore[no-untyped-call]
                flat = flat if is_own else flat.to(f"cuda:{own}", copy=True)
            except RuntimeError as error:
                raise BackendError(
                    f"GPU {_uuid(own)} cannot map the trainer's memory on GPU {payload.gpu}: {error}",
                    fix="these GPUs have no peer access to each other: set cluster.colocated: false, where nccl "
                    "carries the weights",
                ) from error
            yield unpack(flat, slots)

    def close(self) -> None:
        """Let go of what was published. Memory that a receiver still has mapped is freed once it lets go as well."""
        import torch

        if self._kept:
            self._kept.clear()
            torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]
            torch.cuda.empty_cache()  # engines have allocators of their own


def _uuid(index: int) -> str:
    import torch

    return str(torch.cuda.get_device_properties(index).uuid)
