"""Tensors from one process to others that it did not start: rank 0 sends, all others receive, in the same order.

The group is its own: neither side needs a default process group, or has it changed. Its keys lie where torch puts those
of a named group (``torch.distributed.new_group``), so that processes which make theirs with torch can be members.
Nothing is encrypted, and whoever reaches the port first is a member: for networks that are trusted.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal
from urllib.parse import urlsplit

import torch
from nemorl.resources.ports import listening_socket
from torch._C._distributed_c10d import PrefixStore, TCPStore  # torch.distributed offers them, and does not say so
from torch.distributed import BroadcastOptions, ProcessGroupGloo

Carrier = Literal["gloo", "nccl"]
"""``gloo``: host memory over TCP. ``nccl``: device memory, between GPUs."""
SENDER = 0
NAME = "nemorl_weights"
DEVICES = {"gloo": "cpu", "nccl": "cuda"}


@dataclass(frozen=True)
class Meeting:
    """Where the members of a group find each other."""

    address: str
    """Of the sender, as receivers reach it"""
    port: int
    ranks: int
    """Sender and receivers together"""
    name: str = NAME
    carrier: Carrier = "gloo"


class BroadcastGroup:
    """One member's end. Making it waits for all others; each ``broadcast`` for theirs."""

    def __init__(
        self, meeting: Meeting, rank: int, *, timeout_s: float, listening: socket.socket | None = None
    ) -> None:
        """
        Args:
            meeting: The same for all members.
            rank: 0 sends.
            timeout_s: Longest wait for the others, now and at each tensor.
            listening: Of the sender: where the others come to. Taken over.

        Raises:
            RuntimeError: The others did not come in time.
        """
        limit = timedelta(seconds=timeout_s)
        handed = None if listening is None else listening.detach()  # torch closes the descriptor that it is given
        address, port, ranks = meeting.address, meeting.port, meeting.ranks
        store = TCPStore(address, port, ranks, rank == SENDER, limit, master_listen_fd=handed)
        device = DEVICES[meeting.carrier]
        keys = PrefixStore(f"{device}/", PrefixStore(f"{meeting.name}/", PrefixStore(meeting.name, store)))
        self.device = torch.device(device)
        """Where tensors must be"""
        self._group: Any = _MAKERS[meeting.carrier](keys, rank, ranks, limit)

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        """Send a tensor, or fill it with the one that is sent. It is contiguous and on ``device``.

        Raises:
            RuntimeError: A member is gone or late.
        """
        options = BroadcastOptions()
        options.rootRank, options.rootTensor = SENDER, 0
        self._group.broadcast([tensor], options).wait()
        if self.device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        return tensor

    def close(self) -> None:
        """Leave: members that wait for this one get an error. Twice is harmless."""
        self._group = None


def _gloo(keys: PrefixStore, rank: int, ranks: int, limit: timedelta) -> Any:
    return ProcessGroupGloo(keys, rank, ranks, timeout=limit)


def _nccl(keys: PrefixStore, rank: int, ranks: int, limit: timedelta) -> Any:
    from torch.distributed import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = limit
    return ProcessGroupNCCL(keys, rank, ranks, options)


_MAKERS = {"gloo": _gloo, "nccl": _nccl}


def listening_for(url: str) -> tuple[str, socket.socket]:
    """The address under which the machine behind a URL reaches this one, and a socket that listens there.

    Raises:
        OSError: There is no way to that machine.
    """
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    family, kind, *_, there = socket.getaddrinfo(parts.hostname, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as way:
        way.connect(there)  # sends nothing
        address: str = way.getsockname()[0]
    return address, listening_socket("the run, to send weights,", address, 0, waiting=16)
