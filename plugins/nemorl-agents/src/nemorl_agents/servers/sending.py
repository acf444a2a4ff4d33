"""Tensors to the processes of one server: the group that it shares with this process, sending while it receives, and
handles of device memory for engines on the same machine.

Handles are not run: they take GPUs. They are what torch pickles for its own processes; whoever opens one copies from it
while this process holds the tensor. Engines want pickles; they are written here, and never read.
"""

from __future__ import annotations

import asyncio
import base64
import io
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any, Protocol

from nemorl.errors import BackendError
from nemorl_rl.environments.loop_thread import in_thread

from nemorl_agents.servers.connection import GoneError

if TYPE_CHECKING:
    import socket

    from nemorl_tensors.engines.broadcast import Meeting
    from torch import Tensor, device

PART_BYTES = 2**30
"""Of the tensors of one request, where an engine holds them all beside its weights before it loads them."""
Join = Callable[["Meeting"], Awaitable[None]]
"""Has the server's processes join a group; returns once they have."""


class Group(Protocol):
    """This process's end of a broadcast."""

    device: device

    def broadcast(self, tensor: Tensor) -> Tensor: ...


Opener = Callable[["Meeting", float, "socket.socket"], Group]
"""Opens a group as its sender, with seconds to wait for the others, at a socket that listens."""


@dataclass(frozen=True)
class Announced:
    """Tensors that are about to be sent, in this order."""

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    """torch's names, without ``torch.``"""
    shapes: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, tensors: Iterable[tuple[str, Tensor]]) -> Announced:
        found = [(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)) for name, tensor in tensors]
        names, dtypes, shapes = zip(*found, strict=True)
        return cls(names, dtypes, shapes)


def parts(tensors: Mapping[str, Tensor]) -> Iterator[tuple[tuple[str, ...], bool]]:
    """Names of tensors that go together, and whether they are the last."""
    names: list[str] = []
    size = 0
    for name, tensor in tensors.items():
        if names and size + tensor.nbytes > PART_BYTES:
            yield tuple(names), False
            names, size = [], 0
        names.append(name)
        size += tensor.nbytes
    yield tuple(names), True


class Link:
    """The group of one server. It lives until either side fails."""

    def __init__(self, url: str, timeout_s: float) -> None:
        self._url, self._timeout_s = url, timeout_s
        self._group: Group | None = None

    @property
    def is_open(self) -> bool:
        return self._group is not None

    async def open(self, ranks: int, opener: Opener, carrier: str, join: Join) -> None:
        """
        Args:
            ranks: Processes of the server.
            opener: Makes this process's end.
            carrier: Of the tensors.
            join: Makes the others'.

        Raises:
            GoneError: The server went away, or its processes do not reach this one.
        """
        from nemorl_tensors.engines.broadcast import Meeting, listening_for

        try:
            address, listening = listening_for(self._url)
        except OSError as error:
            raise GoneError(f"{self._url}: {error}") from None
        meeting = Meeting(address, listening.getsockname()[1], 1 + ranks, carrier=carrier)  # type: ignore[arg-type]

        async def make() -> None:
            self._group = await in_thread(opener, meeting, self._timeout_s, listening)

        try:
            await both(join(meeting), make())
        except RuntimeError as error:
            self.close()
            raise GoneError(f"{self._url} did not come to {address} to take weights: {_first_line(error)}") from None

    async def send(self, tensors: Sequence[Tensor]) -> None:
        """
        Raises:
            RuntimeError: A process of the server is gone or late.
        """
        group = self._group
        assert group is not None, "it is opened first"

        def run() -> None:
            for tensor in tensors:
                group.broadcast(tensor.to(group.device))

        await in_thread(run)

    def close(self) -> None:
        """The next weights go through another group. A tensor that is being sent keeps this one until it fails."""
        self._group = None


async def both(request: Awaitable[None], sending: Awaitable[None]) -> None:
    """Wait for a request and for what it answers to. If one fails, the other is not waited for: it would hang."""
    tasks = [asyncio.ensure_future(request), asyncio.ensure_future(sending)]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in tasks:
            if task in done:
                task.result()
    finally:
        for task in tasks:
            task.cancel()


def torch_group(meeting: Meeting, timeout_s: float, listening: socket.socket) -> Group:
    """A group of torch's, over gloo or NCCL."""
    from nemorl_tensors.engines.broadcast import SENDER, BroadcastGroup

    return BroadcastGroup(meeting, SENDER, timeout_s=timeout_s, listening=listening)


class VLLMGroup:
    """The sender's end of vLLM's own backend ``nccl``, made by vLLM's code. Not run: it takes GPUs."""

    def __init__(self, meeting: Meeting, timeout_s: float, listening: socket.socket) -> None:
        import torch

        try:
            from vllm.distributed.weight_transfer.nccl_common import trainer_init
        except ImportError as error:
            fix = "pip install nemorl-vllm here, or set generation.backend.weights: folder"
            raise BackendError("vLLM's backend nccl takes weights from vLLM's code alone", fix=fix) from error
        listening.close()  # it listens there itself
        self.device = torch.device("cuda", torch.cuda.current_device())
        where = {"master_address": meeting.address, "master_port": meeting.port, "world_size": meeting.ranks}
        self._group = trainer_init(where)

    def broadcast(self, tensor: Tensor) -> Tensor:
        import torch

        stream = torch.cuda.current_stream()
        self._group.broadcast(tensor.contiguous(), src=0, stream=stream)
        stream.synchronize()
        return tensor


# Handles


def shared_tensors(tensors: Mapping[str, Tensor]) -> str:
    """Names and tensors, pickled by handle, in base64 (SGLang)."""
    return pickled(list(tensors.items()))


def handles(tensors: Mapping[str, Tensor]) -> list[tuple[Any, tuple[Any, ...]]]:
    """For each tensor the function that opens it in another process, and its arguments."""
    from torch.multiprocessing.reductions import reduce_tensor

    return [reduce_tensor(tensor) for tensor in tensors.values()]  # type: ignore[no-untyped-call]


def pickled(content: Any) -> str:
    """In base64."""
    buffer = io.BytesIO()
    ForkingPickler(buffer).dump(content)
    return base64.b64encode(buffer.getvalue()).decode()


def device_name(tensors: Mapping[str, Tensor]) -> str:
    """The number of the GPU, by which engines look for handles."""
    import torch

    tensor = next(iter(tensors.values()))
    return str(torch.cuda.get_device_properties(tensor.device).uuid)


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0][:300]
