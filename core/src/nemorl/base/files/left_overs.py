"""Temporary folders that know their owner, so that those of killed processes can be found and removed.

A folder of ours is called ``nemorl-…`` (or ``nrl-…``, where paths are short), belongs to this user and holds a mark:
which process made it. It is a left-over once that process has ended. Processes that were started for a folder carry its
name (:mod:`nemorl.base.files.process_guard`) and belong to it.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from nemorl.base.files import process_guard
from nemorl.base.files.ownership import Owner

PREFIXES = ("nemorl-", "nrl-")
MARK = ".nemorl-owner"
"""File in a folder: who made it. It names no command, since programs in a sandbox can read it."""
SHARED_MEMORY = Path("/dev/shm")
ROUNDS = 20
POLL_S = 0.1


@dataclass(frozen=True)
class LeftOver:
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


def owned_folder(prefix: str, parent: str | Path | None = None) -> Path:
    """A new temporary folder of this process, for nobody else to read. Whoever asks for it removes it.

    Args:
        prefix: Of its name; begins with one of ``PREFIXES``.
        parent: Unset: the folder for temporary files.
    """
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    mark(folder)
    return folder


def mark(folder: str | Path) -> None:
    """Say in a temporary folder that it is this process's."""
    assert Path(folder).name.startswith(PREFIXES), "others are not found again"
    owner = replace(Owner.me(), command="")
    (Path(folder) / MARK).write_text(json.dumps({**asdict(owner), "namespace": _namespace()}))


@contextmanager
def scratch_folder(prefix: str, parent: str | Path | None = None) -> Iterator[Path]:
    """A temporary folder of this process for the length of a block, as :func:`owned_folder`."""
    folder = owned_folder(prefix, parent)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def usual_places() -> list[Path]:
    """Where temporary folders are."""
    found = (Path(tempfile.gettempdir()), Path("/tmp"), SHARED_MEMORY)
    return [*dict.fromkeys(place.resolve() for place in found if place.is_dir())]


def left_overs(places: Iterable[Path]) -> list[LeftOver]:
    """The folders of this user in some places whose owners have ended.

    One that another machine or container made is none: whether its owner lives cannot be known from here.
    """
    found = []
    for folder in sorted(folder for place in places for prefix in PREFIXES for folder in place.glob(f"{prefix}*")):
        identity, owner = _identity(folder), _owner(folder)
        if identity is not None and owner is not None and owner.is_gone:
            processes = tuple(process_guard.processes(folder))
            found.append(LeftOver(folder, owner, processes, _size(folder), identity))
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
        namespace = found.pop("namespace")
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return None
    return Owner.read(json.dumps(found)) if namespace == _namespace() else None


def _namespace() -> str:
    """Numbers of processes mean something within it; elsewhere than on Linux there is one."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _size(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with suppress(OSError):
            total += path.lstat().st_size
    return total
