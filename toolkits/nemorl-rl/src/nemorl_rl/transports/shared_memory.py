"""The transport ``shared_memory``: one copy into memory that trainer and generator map, on one node."""

from __future__ import annotations

import json
import mmap
import operator
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nemorl.errors import BackendError, WeightsLostError
from nemorl.weights import Export

from nemorl_rl.transports.layout import Slot, aligned, slot_of

if TYPE_CHECKING:
    from nemorl_tensors.engines.buckets import KeptBucket
    from torch import Tensor

HALF_BYTES = 2**42
"""Room for one version in a shared memory file. Address space, not memory: only what is written takes pages."""

Identity = tuple[int, int] | None
"""Device and inode of a file; ``None``: it is gone."""

_mapped: dict[str, _Mapping] = {}
"""Files that this process has fetched weights from, by path. Each stays mapped until its sender is gone."""


@dataclass(frozen=True, slots=True)
class SharedPayload:
    """A memory file of the publishing process, by the path under which others on this node can open it."""

    path: str
    half: int
    """Of the file, 0 or 1"""
    layout: bytes
    """JSON of :data:`nemorl_rl.transports.layout.Slots`. Bytes cost nothing to send, and those of the version
    before need no reading"""


class SharedMemory:
    """An anonymous memory file, its halves written in turn: one version may be read while the next is being written.

    Both sides map it once, for the first touch of a mapped page costs more than copying the page: a receiver keeps the
    mapping between versions, whether or not a tensor lies in it, and drops it at its first fetch after the sender is
    gone. The file has no name in any file system and ends with the last process that has it open, however that ends.
    """

    def __init__(self) -> None:
        self._file: int | None = None
        self._version = 0
        self._halves: list[_Half]

    def publish(self, export: Export) -> SharedPayload:
        if self._file is None:
            self._file = os.memfd_create("nemorl-weights", os.MFD_CLOEXEC)
            os.ftruncate(self._file, 2 * HALF_BYTES)
            memory = _map(self._file)
            self._halves = [_Half(memory, 0), _Half(memory, HALF_BYTES)]
        number = self._version % 2
        self._version += 1
        layout = self._halves[number].write(export)
        return SharedPayload(f"/proc/{os.getpid()}/fd/{self._file}", number, layout)

    def fetch(self, payload: SharedPayload) -> Iterator[Mapping[str, Tensor]]:
        try:
            file = os.open(payload.path, os.O_RDWR)
        except OSError as error:
            raise WeightsLostError(
                f"cannot open the trainer's weights at {payload.path}: {error.strerror}",
                fix="the trainer has ended, or runs in another container, where only object_store reaches it",
            ) from error
        try:
            mapping = _kept(payload.path, file)
        finally:
            os.close(file)
        yield mapping.bucket(payload)

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None
            del self._halves


class _Half:
    """The sender's side of one half. A version that lies as the one before it did is copied and nothing else."""

    def __init__(self, memory: mmap.mmap, start: int) -> None:
        self._memory, self._start = memory, start
        self._places: dict[str, tuple[Slot, Tensor]] = {}
        self._layout = b"{}"

    def write(self, export: Export) -> bytes:
        """Copy a version into this half.

        Returns:
            Its layout.
        """
        import torch

        places: dict[str, tuple[Slot, Tensor]] = {}
        end = self._start
        with torch.no_grad():
            for bucket in export():
                views = []
                for name, tensor in bucket.items():
                    slot, view = places[name] = self._place(name, tensor, aligned(end))
                    end = slot.offset + tensor.nbytes
                    views.append(view)
                if views:  # in one call: between two copies Python would find the processor's caches cold
                    torch._foreach_copy_(views, list(bucket.values()))
        if any(map(operator.is_not, places.values(), self._places.values())) or len(places) != len(self._places):
            self._layout = json.dumps({name: slot for name, (slot, _) in places.items()}).encode()
        self._places = places
        return self._layout

    def _place(self, name: str, tensor: Tensor, offset: int) -> tuple[Slot, Tensor]:
        """Where a tensor goes, which is where it went before if it can."""
        known = self._places.get(name)
        if known is not None:
            slot, view = known
            if slot.offset == offset and view.dtype == tensor.dtype and view.shape == tensor.shape:
                return known
        slot = slot_of(tensor, offset)
        return slot, slot.view(self._memory)


class _Mapping:
    """A receiver's side of a file."""

    def __init__(self, file: int) -> None:
        self.identity = _identity(file)
        self._memory = _map(file)
        self._buckets: dict[int, tuple[bytes, KeptBucket]] = {}

    def bucket(self, payload: SharedPayload) -> KeptBucket:
        """The tensors of one half, as views; those of the version before it if they lie in the same places."""
        from nemorl_tensors.engines.buckets import KeptBucket

        layout, bucket = self._buckets.get(payload.half, (b"", None))
        if bucket is None or layout != payload.layout:
            slots = {name: Slot(*facts) for name, facts in json.loads(payload.layout).items()}
            bucket = KeptBucket({name: slot.view(self._memory) for name, slot in slots.items()})
            self._buckets[payload.half] = payload.layout, bucket
        return bucket


def _kept(path: str, file: int) -> _Mapping:
    """The mapping of a file that is open; those of senders that are gone are dropped."""
    for other, mapping in list(_mapped.items()):
        if _identity(other) != mapping.identity:
            _mapped.pop(other, None)
    if path not in _mapped:
        _mapped[path] = _Mapping(file)
    return _mapped[path]


def _identity(file: int | str) -> Identity:
    try:
        facts = os.stat(file)
    except OSError:
        return None
    return facts.st_dev, facts.st_ino


def _map(file: int) -> mmap.mmap:
    try:
        memory = mmap.mmap(file, 2 * HALF_BYTES)
    except OSError as error:
        raise BackendError(
            f"cannot map {2 * HALF_BYTES / 2**40:.0f} TiB of address space for weights in shared memory: "
            f"{error.strerror}",
            fix="lift the limit on address space (`ulimit -v unlimited`); it is not memory",
        ) from error
    memory.madvise(mmap.MADV_DONTDUMP)  # a core dump would walk all of it
    return memory
