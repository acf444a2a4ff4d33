"""Folders of runs that were killed: found by their marks, and removed with the processes that were started for them.

A folder is left over once the process that made it has ended. Processes that were started for a folder carry its name
(:mod:`nemorl.base.files.process_guard`) and belong to it.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from nemorl.base.files import process_guard
from nemorl.base.files.owned_folders import MARK, PREFIXES, namespace
from nemorl.base.files.ownership import Owner

SHARED_MEMORY = Path("/dev/shm")
ROUNDS = 20
POLL_S = 0.1


@dataclass(frozen=True)
class LeftFolder:
    """A folder whose owner has ended."""

    folder: Path
    owner: Owner
    processes: tuple[int, ...]
    """That were started for it, and live."""
    bytes: int
    identity: tuple[int, int]
    """Device and inode."""

    def remove(self) -> bool:
        """End its processes and remove it; returns whether it is gone. What is there in its place by now stays."""
        for _ in range(ROUNDS):
            if _identity(self.folder) != self.identity or _owner(self.folder) != self.owner:
                return not os.path.lexists(self.folder)
            living = process_guard.processes(self.folder)
            for process in living:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(process, signal.SIGKILL)
            if not living:
                break
            time.sleep(POLL_S)
        shutil.rmtree(self.folder, ignore_errors=True)
        return not self.folder.exists()


def usual_places() -> list[Path]:
    """Where temporary folders are."""
    found = (Path(tempfile.gettempdir()), Path("/tmp"), SHARED_MEMORY)
    return [*dict.fromkeys(place.resolve() for place in found if place.is_dir())]


def left_folders(places: Iterable[Path]) -> list[LeftFolder]:
    """The folders of this user in some places whose owners have ended.

    One that another machine or container made is none: whether its owner lives cannot be known from here.
    """
    found = []
    for folder in sorted(folder for place in places for prefix in PREFIXES for folder in place.glob(f"{prefix}*")):
        identity, owner = _identity(folder), _owner(folder)
        if identity is not None and owner is not None and owner.is_gone:
            processes = tuple(process_guard.processes(folder))
            found.append(LeftFolder(folder, owner, processes, _size(folder), identity))
    return found


def _identity(folder: Path) -> tuple[int, int] | None:
    """Of a folder of this user; ``None`` for links and what is anybody else's."""
    try:
        found = os.lstat(folder)
    except OSError:
        return None
    is_ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
    return (found.st_dev, found.st_ino) if is_ours else None


def _owner(folder: Path) -> Owner | None:
    """Who made a folder; ``None`` where it does not say, or in another container."""
    try:
        file = os.open(folder / MARK, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(file) as opened:
            found = json.loads(opened.read(10_000))
        where = found.pop("namespace")
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return None
    return Owner.read(json.dumps(found)) if where == namespace() else None


def _size(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with suppress(OSError):
            total += path.lstat().st_size
    return total
