"""Keep freed memory in the process, on the CPU.

glibc gives the top of the heap back to the system as soon as it is free. A training step frees and allocates the same
few tens of megabytes over and over, so the system zeroes the same pages again and again: up to a fifth of a step of a
small model. On a GPU, torch's own caching allocator does what this does here.
"""

from __future__ import annotations

import ctypes
import sys

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3
"""Parameters of ``mallopt(3)``."""
KEPT_BYTES = 1 << 30
"""Freed memory is returned only beyond this much of it."""
GROWTH_BYTES = 64 << 20
"""The heap grows by at least this."""
MMAP_BYTES = 32 << 20
"""Larger blocks are mapped and unmapped each time; glibc's own upper limit for this value."""


def keep_freed_memory(device: str) -> None:
    """Tell glibc so. Does nothing on a GPU or with another C library; calling it twice is harmless."""
    if device != "cpu" or not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for parameter, value in (
            (M_TRIM_THRESHOLD, KEPT_BYTES),
            (M_TOP_PAD, GROWTH_BYTES),
            (M_MMAP_THRESHOLD, MMAP_BYTES),
        ):
            mallopt(parameter, value)
