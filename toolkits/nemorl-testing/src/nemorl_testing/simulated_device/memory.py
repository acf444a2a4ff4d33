"""The simulated device's memory, accounted as CUDA's caching allocator does.

Requests are rounded up to 512 bytes. Small ones (at most 1 MiB) are cut from segments of 2 MiB, others from segments
of 20 MiB, or of their own size from 10 MiB on. The smallest free piece that fits is taken and split; neighbours that
are free again are joined; segments stay reserved until :func:`empty_cache`. (PyTorch, "CUDA semantics: memory
management"; ``c10/cuda/CUDACachingAllocator``.)
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import torch

ROUND = 512
SMALL, LARGE = 1 << 20, 10 << 20
SMALL_SEGMENT, LARGE_SEGMENT = 2 << 20, 20 << 20
GIB = 2**30


@dataclass(eq=False)
class Piece:
    """Of a segment, in a doubly linked list of its neighbours."""

    bytes: int
    is_small: bool
    """Of the pool of small requests."""
    is_free: bool = True
    before: Piece | None = None
    after: Piece | None = None


@dataclass
class Allocator:
    """Of one device. All counts are bytes."""

    total: int = 80 * GIB
    allocated: int = 0
    reserved: int = 0
    peak: int = 0
    """Most that was allocated since :meth:`reset_peak`."""
    allocations: int = 0
    """So far."""
    _free: dict[bool, list[Piece]] = field(default_factory=lambda: {True: [], False: []})
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def allocate(self, size: int) -> Piece | None:
        """A piece of at least ``size`` bytes; None for no bytes.

        Raises:
            torch.OutOfMemoryError: More would be reserved than there is, and the cache does not help.
        """
        if not size:
            return None
        rounded = -(-size // ROUND) * ROUND
        with self._lock:
            piece = self._fitting(rounded) or self._segment(rounded)
            self._split(piece, rounded)
            piece.is_free = False
            self.allocated += piece.bytes
            self.allocations += 1
            self.peak = max(self.peak, self.allocated)
        return piece

    def free(self, piece: Piece | None) -> None:
        """Give a piece back to the cache."""
        if piece is None:
            return
        with self._lock:
            self.allocated -= piece.bytes
            piece.is_free = True
            self._join(piece)
            self._free[piece.is_small].append(piece)

    def empty_cache(self) -> None:
        """Give segments that are free as a whole back to the device."""
        with self._lock:
            for pool in self._free.values():
                for piece in [one for one in pool if one.before is None and one.after is None]:
                    pool.remove(piece)
                    self.reserved -= piece.bytes

    def reset_peak(self) -> None:
        """Begin anew with what is allocated now."""
        self.peak = self.allocated

    def _fitting(self, size: int) -> Piece | None:
        pool = self._free[size <= SMALL]
        found = min((piece for piece in pool if piece.bytes >= size), key=lambda piece: piece.bytes, default=None)
        if found is not None:
            pool.remove(found)
        return found

    def _segment(self, size: int) -> Piece:
        is_small = size <= SMALL
        wanted = SMALL_SEGMENT if is_small else LARGE_SEGMENT
        if size >= LARGE:
            wanted = -(-size // SMALL_SEGMENT) * SMALL_SEGMENT
        if self.reserved + wanted > self.total:
            self.empty_cache()
        if self.reserved + wanted > self.total:
            raise torch.OutOfMemoryError(
                f"out of memory on the simulated device: tried to allocate {size} bytes of {self.total}, "
                f"{self.allocated} are allocated and {self.reserved} reserved"
            )
        self.reserved += wanted
        return Piece(wanted, is_small)

    def _split(self, piece: Piece, size: int) -> None:
        left = piece.bytes - size
        if left < (ROUND if piece.is_small else SMALL + 1):
            return
        rest = Piece(left, piece.is_small, before=piece, after=piece.after)
        if piece.after is not None:
            piece.after.before = rest
        piece.after, piece.bytes = rest, size
        self._free[piece.is_small].append(rest)

    def _join(self, piece: Piece) -> None:
        for other in (piece.before, piece.after):
            if other is None or not other.is_free:
                continue
            self._free[other.is_small].remove(other)
            piece.bytes += other.bytes
            if other is piece.before:
                piece.before = other.before
                if other.before is not None:
                    other.before.after = piece
            else:
                piece.after = other.after
                if other.after is not None:
                    other.after.before = piece
