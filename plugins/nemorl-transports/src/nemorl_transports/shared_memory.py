"""The transport ``shared_memory``: one copy into memory that trainer and generator map, on one node."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nemorl.errors import BackendError, WeightsLostError
from nemorl.weights import Export

from nemorl_transports.layout import Slot, Slots, aligned, slot_of

if TYPE_CHECKING:
    from torch import Tensor

HALF_BYTES = 2**42
"""Room for one version in a shared memory file. Address space, not memory: only what is written takes pages."""

Identity = tuple[int, int] | None
"""Device and inode of a file; ``None``: it is gone."""

_mapped: dict[str, tuple[Identity, mmap.mmap]] = {}
"""Files that this process has fetched weights from, by path. Each stays mapped until its sender is gone."""


@dataclass(frozen=True, slots=True)
class SharedPayload:
    """A memory file of the publishing process, by the path under which others on this node can open it."""

    path: str
    slots: Slots


class SharedMemory:
    """An anonymous memory file, its halves written in turn: one version may be read while the next is being written.

    Both sides map it once, for the first touch of a mapped page costs more than copying the page: a receiver keeps the
    mapping between versions, whether or not a tensor lies in it, and drops it at its first fetch after the sender is
    gone. The file has no name in any file system and ends with the last process that has it open, however that ends.
    """

    def __init__(self) -> None:
        self._file: int | None = None
        self._memory: mmap.mmap
        self._version = 0

    def publish(self, export: Export) -> SharedPayload:
        if self._file is None:
            self._file = os.memfd_create("nemorl-weights", os.MFD_CLOEXEC)
            os.ftruncate(self._file, 2 * HALF_BYTES)
            self._memory = _map(self._file)
        slots: dict[str, Slot] = {}
        end = HALF_BYTES * (self._version % 2)
        self._version += 1
        for bucket in export():
            for name, tensor in bucket.items():
                slots[name] = slot_of(tensor, aligned(end))
                end = slots[name].offset + tensor.nbytes
                slots[name].view(self._memory).copy_(tensor.detach())
        return SharedPayload(f"/proc/{os.getpid()}/fd/{self._file}", slots)

    def fetch(self, payload: SharedPayload) -> Iterator[Mapping[str, Tensor]]:
        try:
            file = os.open(payload.path, os.O_RDWR)
        except OSError as error:
            raise WeightsLostError(
                f"cannot open the trainer's weights at {payload.path}: {error.strerror}",
                fix="the trainer has ended, or runs in another container, where only object_store reaches it",
            ) from error
        try:
            memory = _kept(payload.path, file)
        finally:
            os.close(file)
        yield {name: slot.view(memory) for name, slot in payload.slots.items()}

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None
            del self._memory


def _kept(path: str, file: int) -> mmap.mmap:
    """The mapping of a file that is open; those of senders that are gone are dropped."""
    for other, (known, _) in list(_mapped.items()):
        if _identity(other) != known:
            _mapped.pop(other, None)
    if path not in _mapped:
        _mapped[path] = (_identity(file), _map(file))
    return _mapped[path][1]


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
