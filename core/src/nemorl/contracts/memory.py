"""Contracts of backends that give device memory back while others work.

A training backend states the capability ``offload``, an engine the capability ``sleep``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, Protocol, runtime_checkable

from nemorl.errors import BackendError

MemoryPart = Literal["weights", "gradients", "optimizer", "reference", "cache"]
"""A part of what a backend keeps in a device's memory. ``optimizer``: float32 copies of the weights and the optimizer's
moments; ``reference``: the frozen initial weights; ``cache``: an engine's keys and values.

>>> part: MemoryPart = "optimizer"
"""


@runtime_checkable
class OffloadingBackend(Protocol):
    """A training backend that leaves a device's memory while others work (capability ``offload``).

    What is away comes back bit for bit. A part that is where it is wanted, or that does not exist, stays as it is.

    >>> backend.offload(["optimizer", "gradients"])  # doctest: +SKIP
    """

    def offload(self, parts: Sequence[MemoryPart]) -> None:
        """Move parts to the host's memory, and give their device memory back."""
        ...

    def onload(self, parts: Sequence[MemoryPart]) -> None:
        """Bring parts back, in this order."""
        ...

    def held_bytes(self) -> Mapping[MemoryPart, int]:
        """Bytes of device memory that each part takes now."""
        ...


@runtime_checkable
class SleepingBackend(Protocol):
    """An engine that leaves a device's memory while others work (capability ``sleep``).

    >>> engine.sleep(1); engine.wake(["weights", "cache"])  # doctest: +SKIP
    """

    def sleep(self, level: Literal[1, 2]) -> None:
        """Give all device memory back: 1 keeps the weights in the host's memory (what cannot be moved stays), 2
        forgets them, and requests are refused with a ``WeightsForgottenError`` until an update brings others. What is
        cached is dropped either way.

        An engine that sleeps at 1 and is told 2 lets go of what it kept, if it can.
        """
        ...

    def wake(self, parts: Sequence[MemoryPart]) -> None:
        """Bring parts back, in this order: an engine that has its weights can be updated, and generates once it also
        has its cache."""
        ...

    def held_bytes(self) -> Mapping[MemoryPart, int]:
        """Bytes of device memory that each part takes now."""
        ...


class WeightsForgottenError(BackendError):
    """An engine was asked to generate after it slept at level 2, and before an update brought it weights.

    >>> raise WeightsForgottenError("there are no weights to generate from", fix="update them first")
    Traceback (most recent call last):
    nemorl.contracts.memory.WeightsForgottenError: there are no weights to generate from
      fix: update them first
    """


class DeviceMemoryError(BackendError):
    """A device's memory does not suffice for the work at hand. Where models share devices, the run adds who holds what.

    >>> raise DeviceMemoryError("out of memory on cuda:0", fix="lower policy.microbatch_tokens")
    Traceback (most recent call last):
    nemorl.contracts.memory.DeviceMemoryError: out of memory on cuda:0
      fix: lower policy.microbatch_tokens
    """
