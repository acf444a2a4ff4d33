"""The sender's side: the bits that were published last, and messages that lead an engine to them.

Of a version only what has changed since the one before is computed, once, while it is published; it also leads back,
so that one copy of the weights and two lists of changes serve engines at either of two versions. Reading while the next
version is taken in is allowed: each tensor is locked for itself.
"""

from __future__ import annotations

import json
import struct
import threading
import zlib
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from nemorl.weights import Digest, Export
from nemorl_tensors.engines.digests import digests

from nemorl_rl.transports.delta.changes import Plane, apply, changes
from nemorl_rl.transports.layout import bytes_of, slot_of

if TYPE_CHECKING:
    from torch import Tensor

KEPT_VERSIONS = 2
"""The newest and the one before, which may still be on its way to somebody."""
MAGIC = b"nemo"
HEAD = struct.Struct("<4sII")
"""Before the header of a message: :data:`MAGIC`, its length, its CRC-32."""


class GoneError(Exception):
    """A version that is no longer kept. Among both ends only."""


@dataclass
class Version:
    """What has changed since the version before."""

    number: int
    planes: dict[str, list[Plane] | None] = field(default_factory=dict)
    """By tensor; ``None``: it has no predecessor of its dtype and shape"""
    digests: dict[str, Digest] = field(default_factory=dict)
    """Of its tensors, in the order in which they were published"""
    replaced: dict[str, Tensor] = field(default_factory=dict)
    """Tensors of the version before to which no changes lead back"""
    follows: bool = False
    """There is a version before that is whole"""


class Message(NamedTuple):
    """What an engine is sent."""

    is_whole: bool
    why: str
    """Why it does not change what the engine has; empty: it does, or the engine asked for no changes, or they are no
    smaller"""
    nbytes: int
    parts: Iterator[Any]
    """Runs of bytes, to be written one after the other"""


class KeptVersions:
    """The weights as they were published last."""

    def __init__(self) -> None:
        self._bits: dict[str, Tensor] = {}
        """On the CPU, contiguous: those of the newest version, also of one that is being taken in"""
        self._versions: deque[Version] = deque(maxlen=KEPT_VERSIONS)
        self._number = 0
        self._is_complete = False
        self._lock = threading.Lock()

    @torch.no_grad()
    def publish(self, export: Export) -> int:
        """Take a version in. Returns its number, counted from 1."""
        version = Version(self._number + 1, follows=self._is_complete)
        self._is_complete = False
        with self._lock:
            self._number = version.number
            self._versions.append(version)
        for bucket in export():
            for name, tensor in bucket.items():
                found = bytes_of(tensor)
                with self._lock:
                    version.planes[name] = self._take(version, name, tensor, found)
            version.digests |= digests({name: self._bits[name] for name in bucket})
        with self._lock:
            for name in self._bits.keys() - version.planes.keys():
                version.replaced[name] = self._bits.pop(name)
        self._is_complete = True
        return version.number

    def _take(self, version: Version, name: str, tensor: Tensor, found: Any) -> list[Plane] | None:
        held = self._bits.get(name)
        if held is not None and slot_of(held) == slot_of(tensor):
            return changes(bytes_of(held), found, tensor.dtype.itemsize)
        if held is not None:
            version.replaced[name] = held
        own = torch.empty(tensor.shape, dtype=tensor.dtype)
        bytes_of(own)[:] = found
        self._bits[name] = own
        return None

    def message(self, number: int, base: int | None) -> Message:
        """What leads to a version: from the one before it if the engine has that and it saves bytes, else from nothing.

        Args:
            number: Of the version.
            base: Of the one that the engine has.

        Raises:
            GoneError: The version is no longer kept.
        """
        with self._lock:
            version = next((kept for kept in self._versions if kept.number == number), None)
        if version is None:
            raise GoneError(f"version {number} of the weights is not kept: the newest is {self._number}")
        why = "" if base is None else f"it had version {base} when {number} was sent"
        entries = whole = [Entry(name, digest, None) for name, digest in version.digests.items()]
        if version.follows and base == number - 1:
            why = ""
            changed = [entry._replace(planes=version.planes[entry.name]) for entry in whole]
            entries = min(changed, whole, key=_nbytes)
        header = header_bytes(number, None if entries is whole else base, entries)
        nbytes = len(header) + _nbytes(entries)
        return Message(entries is whole, why, nbytes, self._parts(number, header, entries))

    def _parts(self, number: int, header: bytes, entries: list[Entry]) -> Iterator[Any]:
        yield header
        for entry in entries:
            if entry.planes is None:
                yield self._at(entry.name, number)
            else:
                for plane in entry.planes:
                    yield plane.places
                    yield plane.values

    def _at(self, name: str, number: int) -> Any:
        """A copy of a tensor's bytes in one of the two versions."""
        with self._lock:
            newest = self._versions[-1]
            if number < newest.number - 1:
                raise GoneError(f"version {number} of the weights is not kept: the newest is {newest.number}")
            is_before = number < newest.number
            if is_before and name in newest.replaced:
                return bytes_of(newest.replaced[name])
            held = self._bits[name]
            found = bytes_of(held).copy()
            planes = newest.planes.get(name) if is_before else None
        if planes is not None:
            apply(planes, found, held.dtype.itemsize)
        return found


class Entry(NamedTuple):
    """A tensor in a message."""

    name: str
    digest: Digest
    """After the message was applied"""
    planes: list[Plane] | None
    """What has changed; ``None``: all of its bytes come"""

    @property
    def nbytes(self) -> int:
        """Behind the header."""
        if self.planes is None:
            size: int = torch.Size(self.digest.shape).numel() * getattr(torch, self.digest.dtype).itemsize
            return size
        return sum(plane.nbytes for plane in self.planes)


def _nbytes(entries: list[Entry]) -> int:
    return sum(entry.nbytes for entry in entries)


def header_bytes(number: int, base: int | None, entries: list[Entry]) -> bytes:
    """The beginning of a message: which version it leads to, from which, and what comes of each tensor."""
    tensors = [
        [
            entry.name,
            *entry.digest,
            None
            if entry.planes is None
            else [[plane.form, plane.changed, len(plane.places), len(plane.values)] for plane in entry.planes],
        ]
        for entry in entries
    ]
    text = json.dumps({"version": number, "base": base, "tensors": tensors}, separators=(",", ":")).encode()
    return HEAD.pack(MAGIC, len(text), zlib.crc32(text)) + text
