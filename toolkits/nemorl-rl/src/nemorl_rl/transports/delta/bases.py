"""The engine's side: the bits that it fetched last, brought to the next version and proven by the digests in messages.

One copy of the weights in the process's memory for each sender that it knows. Engines are given copies of these, tensor
by tensor: nothing that one does to its own weights reaches the base of the next version.
"""

from __future__ import annotations

import json
import threading
import zlib
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol

import torch
from nemorl.errors import BackendError
from nemorl.weights import Digest
from nemorl_tensors.engines.buckets import BroughtBucket, in_buckets
from nemorl_tensors.engines.digests import digests

from nemorl_rl.transports.delta.changes import Bytes, DamageError, Plane, apply
from nemorl_rl.transports.delta.versions import HEAD, MAGIC
from nemorl_rl.transports.layout import bytes_of

if TYPE_CHECKING:
    from torch import Tensor

NAMED = 3
"""Tensors that a message names."""
IDLE_FETCHES = 8
"""Fetches from other senders after which a sender counts as gone, and the bits of its weights are dropped. Those that
live (the policy, a draft beside it) are fetched from in turn."""


class Ask(Protocol):
    """Brings a message from the sender."""

    def __call__(self, base: int | None, why: str) -> AbstractContextManager[BinaryIO]:
        """
        Args:
            base: The version that is held; ``None``: the whole weights are wanted.
            why: What was wrong with a message or with the base; empty: nothing.

        Raises:
            DamageError: It broke off; to be asked again.
            WeightsLostError: The sender is gone.
            BackendError: It does not keep the version any more.
        """
        ...


@dataclass
class Base:
    """The weights of one sender, as they were fetched last."""

    number: int | None = None
    """Of the version; ``None``: there are none that are proven"""
    tensors: dict[str, Tensor] = field(default_factory=dict)
    """On the CPU, contiguous"""
    idle: int = 0
    """Fetches from other senders since the last from this one"""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def bring(self, number: int, ask: Ask) -> int:
        """Hold a version from now on: by changes where they are to be had and lead to it, else whole.

        Returns:
            Bytes that were read.

        Raises:
            BackendError: Two messages in turn were damaged; says how.
        """
        if self.number == number:
            return 0
        why: list[str] = []
        for base in (self.number, None):
            try:
                with ask(base, why[-1] if why else "") as message:
                    return self.take(message, number)
            except DamageError as error:
                why.append(str(error))
        raise BackendError(
            f"version {number} of the weights came damaged twice: {'; then '.join(why)}",
            fix="look at the network, the file system and the memory between trainer and engine, or unset "
            "cluster.weight_transport",
        )

    @torch.no_grad()
    def take(self, message: BinaryIO, number: int) -> int:
        """Hold what a message leads to.

        Raises:
            DamageError: It is of another base, or what it leads to has not the digests that were sent.
        """
        header, nbytes = _header(message)
        if header["version"] != number:
            raise DamageError(f"it leads to version {header['version']} instead of {number}")
        if header["base"] not in (None, self.number):
            raise DamageError(f"it changes version {header['base']}, and version {self.number} is held")
        self.number = None
        found: dict[str, Tensor] = {}
        sent: dict[str, Digest] = {}
        for name, dtype, shape, value, planes in header["tensors"]:
            sent[name] = digest = Digest(dtype, tuple(shape), value)
            found[name] = tensor = self._place(name, digest)
            if planes is None:
                nbytes += _read_into(message, bytes_of(tensor))
            else:
                came = [Plane(form, count, _read(message, a), _read(message, b)) for form, count, a, b in planes]
                nbytes += sum(plane.nbytes for plane in came)
                self._change(name, tensor, came)
        held = digests(found)
        if wrong := [name for name in sent if held[name] != sent[name]]:
            more = f" and {len(wrong) - NAMED} more" if len(wrong) > NAMED else ""
            raise DamageError(f"other digests than were sent, of {', '.join(wrong[:NAMED])}{more}")
        self.tensors, self.number = found, number
        return nbytes

    def _place(self, name: str, digest: Digest) -> Tensor:
        """Memory for a tensor: that of the version before, where it is like it."""
        dtype, held = getattr(torch, digest.dtype), self.tensors.get(name)
        if held is not None and held.dtype == dtype and tuple(held.shape) == digest.shape:
            return held
        return torch.empty(digest.shape, dtype=dtype)

    def _change(self, name: str, tensor: Tensor, planes: list[Plane]) -> None:
        if tensor is not self.tensors.get(name):
            raise DamageError(f"changes of {name}, of which no such tensor is held")
        try:
            apply(planes, bytes_of(tensor), tensor.dtype.itemsize)
        except DamageError as error:
            raise DamageError(f"{name}: {error}") from error

    def buckets(self, number: int, brought_bytes: int) -> Iterator[Mapping[str, Tensor]]:
        """Copies of the tensors, the first with the bytes that were read for all of them."""
        names = list(self.tensors)
        for bucket in in_buckets(((each := self._copy(name, number)), each[name].nbytes) for name in names):
            brought = BroughtBucket(bucket)
            brought.brought_bytes, brought_bytes = brought_bytes, 0
            yield brought

    def _copy(self, name: str, number: int) -> dict[str, Tensor]:
        with self.lock:
            if self.number != number:
                raise BackendError(
                    f"version {number} of the weights was replaced while it was read",
                    fix="read a version to its end before the next is fetched",
                )
            return {name: self.tensors[name].clone()}


class Bases:
    """Those of all senders that a process knows."""

    def __init__(self) -> None:
        self._by_sender: dict[str, Base] = {}
        self._lock = threading.Lock()

    def of(self, sender: str) -> Base:
        """The base of one, which has just been asked for; those of senders that are gone are dropped."""
        with self._lock:
            for name, other in list(self._by_sender.items()):
                other.idle += 1
                if other.idle > IDLE_FETCHES:
                    del self._by_sender[name]
            base = self._by_sender.setdefault(sender, Base())
            base.idle = 0
            return base

    def fetch(self, sender: str, number: int, ask: Ask) -> Iterator[Mapping[str, Tensor]]:
        """A version, in buckets."""
        base = self.of(sender)
        with base.lock:
            nbytes = base.bring(number, ask)
        yield from base.buckets(number, nbytes)


OF_PROCESS = Bases()
"""Each fetch has an end of the transport of its own; what was fetched before is the process's."""


def _header(message: BinaryIO) -> tuple[dict[str, Any], int]:
    magic, length, crc = HEAD.unpack(_read(message, HEAD.size))
    if magic != MAGIC:
        raise DamageError("it does not begin as a message does")
    text = _read(message, length)
    if zlib.crc32(text) != crc:
        raise DamageError("its header is damaged")
    found: dict[str, Any] = json.loads(text)
    return found, HEAD.size + length


def _read(message: BinaryIO, size: int) -> bytes:
    try:
        found = message.read(size)
    except OSError as error:
        raise DamageError(f"it broke off: {error}") from error
    if len(found) != size:
        raise DamageError(f"it broke off {size - len(found)} bytes early")
    return found


def _read_into(message: BinaryIO, target: Bytes) -> int:
    view, done = memoryview(target), 0  # type: ignore[arg-type,unused-ignore]
    while done < len(view):
        try:
            count = message.readinto(view[done:])  # type: ignore[attr-defined]
        except OSError as error:
            raise DamageError(f"it broke off: {error}") from error
        if not count:
            raise DamageError(f"it broke off {len(view) - done} bytes early")
        done += count
    return done
