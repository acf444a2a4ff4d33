"""Faults of a disk at one chosen file operation, by ``faulty_files.c``, which is built where a C compiler is."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).with_suffix(".c")
CHANGES = frozenset({"open-write", "write", "truncate", "mkdir", "rmdir", "unlink", "rename", "link"})
"""Kinds after which the disk holds something else: a kill before any other is the same as one before the next."""
TAKES_SPACE = frozenset({"open-write", "write", "sync", "mkdir", "link", "allocate"})
"""Kinds that a full disk refuses. A sync too: space may be given out when data are written back."""


@dataclass(frozen=True)
class Mode:
    """A way to fail: its number in the library, the errno, and the kinds of operations that can fail so."""

    number: int
    error: int = 0
    kinds: frozenset[str] | None = None
    """Unset: all."""


MODES = {
    "io error": Mode(1, errno.EIO),
    "no space once": Mode(1, errno.ENOSPC, TAKES_SPACE),
    "short write": Mode(2, errno.ENOSPC, frozenset({"write"})),
    "killed before": Mode(3, 0, CHANGES),
    "killed in a write": Mode(4, 0, frozenset({"write"})),
    "full from here": Mode(5, errno.ENOSPC, TAKES_SPACE),
}


@dataclass(frozen=True)
class Fault:
    """The ``occurrence``-th operation of a key (kind and path, digits as ``#``) fails in a mode."""

    key: str
    occurrence: int
    mode: str

    def __str__(self) -> str:
        return f"{self.mode}: {self.key} ({self.occurrence})"


def build(folder: Path) -> Path:
    """The library, compiled into a folder."""
    library = folder / "faulty_files.so"
    compiler = shutil.which("cc")
    assert compiler is not None
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", library, SOURCE, "-ldl"], check=True)
    return library


def arm(folder: Path, fault: Fault | None, trace: Path) -> None:
    """From now on, operations of this process on a folder are traced into a file, and one of them fails.

    Only in a process that was started with the library preloaded.
    """
    mode = MODES[fault.mode] if fault else Mode(0)
    key, occurrence = (fault.key, fault.occurrence) if fault else ("", 0)
    descriptor = os.open(trace, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    ctypes.CDLL(None).faulty_files_arm(
        os.fsencode(folder), os.fsencode(key), occurrence, mode.number, mode.error, descriptor
    )


def operations(trace: Path) -> list[tuple[str, int]]:
    """Key and occurrence of every operation in a trace, in order."""
    seen: Counter[str] = Counter()
    found = []
    for line in trace.read_text().splitlines():
        if not line.startswith("! "):
            seen[line] += 1
            found.append((line, seen[line]))
    return found


def has_struck(trace: Path) -> bool:
    return any(line.startswith("! ") for line in trace.read_text().splitlines())


def faults_at(places: Iterable[tuple[str, int]]) -> Iterator[Fault]:
    """Every way in which each of these operations can fail."""
    for key, occurrence in places:
        for name, mode in MODES.items():
            if mode.kinds is None or key.partition(" ")[0] in mode.kinds:
                yield Fault(key, occurrence, name)
