"""One owner per run directory: who writes there holds a lock, and says who it is.

The lock is the kernel's (``flock``, by the library filelock), so it ends with its process, however that ends. Where a
file system has none, the existence of a file beside the record is the lock, filelock's ``SoftFileLock``: it holds as
long as the process that it names is alive on its machine.
"""

from __future__ import annotations

import errno
import json
import os
import shlex
import socket
import sys
import time
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from nemorl.base.files.atomic import remove_drafts, storing
from nemorl.base.text.secrets import redacted
from nemorl.errors import RunInUseError

if TYPE_CHECKING:
    from filelock import BaseFileLock

FILE = "run.lock"
MARKER = f".{FILE}.held"
"""The lock where the file system has none."""
NO_FLOCK = {errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL}
"""The errors of file systems without locks."""


@dataclass(frozen=True)
class Owner:
    """A process that may write in a run directory."""

    host: str
    pid: int
    boot_id: str
    """The host's boot id: a pid from before the last boot means nothing."""
    process_start: str
    """Clock ticks after that at which the process started; tells it from a later one with its pid."""
    since: float
    """Epoch seconds."""
    command: str

    @classmethod
    def me(cls) -> Owner:
        command = shlex.join([Path(sys.argv[0]).name or "python", *map(redacted, sys.argv[1:])])
        return cls(socket.gethostname(), os.getpid(), _boot_id(), _start_of(os.getpid()) or "", time.time(), command)

    @classmethod
    def read(cls, text: str) -> Owner | None:
        """The owner that a record names; ``None`` for one that is empty, cut or of another shape."""
        try:
            found = cls(**json.loads(text))
            return found if type(found.pid) is int and str(found) else None
        except (ValueError, TypeError, OverflowError, OSError, RecursionError):  # of its time, too
            return None

    @property
    def is_gone(self) -> bool:
        """Its process has ended. False where that cannot be known from here."""
        if self.host != socket.gethostname():
            return False
        return self.boot_id != _boot_id() or _start_of(self.pid) != self.process_start

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        return f"process {self.pid} on {self.host}, since {since}: {self.command}"


class Ownership:
    """The right to write in a folder, while this object is kept, until :meth:`close` or the end of the process."""

    def __init__(self, folder: Path) -> None:
        """
        Raises:
            RunInUseError: Another process has it; says which, since when, and how to proceed.
        """
        self.folder = folder
        self._path = folder / FILE
        with ExitStack() as undo, storing(self._path):
            self._lock = self._acquired()
            undo.callback(self._lock.release)
            self._path.write_bytes(json.dumps(asdict(Owner.me())).encode())
            undo.pop_all()
        remove_drafts(folder)

    def close(self) -> None:
        """Give it up. Calling it twice is harmless.

        A disk that refuses leaves the record, not the lock: whoever comes next finds that its owner is gone.
        """
        if not self._lock.is_locked:
            return
        with suppress(OSError):
            self._path.write_bytes(b"")
        with suppress(OSError):
            self._lock.release()

    def _acquired(self) -> BaseFileLock:
        from filelock import FileLock, SoftFileLock, Timeout  # 40 ms: only who writes needs it

        lock: BaseFileLock = FileLock(self._path, thread_local=False, blocking=False, fallback_to_soft=False)
        try:
            try:
                lock.acquire()
            except OSError as error:
                if error.errno not in NO_FLOCK:
                    raise
                lock = SoftFileLock(self.folder / MARKER, thread_local=False, blocking=False)
                lock.acquire()
        except Timeout:
            raise self._held(Path(lock.lock_file)) from None
        return lock

    def _holder(self) -> Owner | None:
        """The owner by the record, which follows the lock within moments."""
        for _ in range(20):
            holder = Owner.read(self._path.read_text(errors="replace")) if self._path.is_file() else None
            if holder is not None:
                return holder
            time.sleep(0.05)
        return None

    def _held(self, lock: Path) -> RunInUseError:
        holder = self._holder()
        who = str(holder or "another process, which left no name")
        if lock.name == MARKER and (holder is None or holder.is_gone or holder.host != socket.gethostname()):
            fix = f"wait for it; if it has ended, remove {lock}"
        elif holder is None:
            fix = f"wait for it, or look for it with: fuser {lock}"
        elif holder.is_gone:
            who, fix = f"a child of {holder} (which has ended)", f"end it; this finds it: fuser {lock}"
        else:
            fix = f"wait for it or stop it (kill {holder.pid}), or give this run another run_dir"
        return RunInUseError(f"{self.folder} is in use by {who}", fix=fix)


@cache
def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""  # not Linux: pids are all there is


def _start_of(pid: int) -> str | None:
    """Start of a process, in ticks since boot; ``None`` if there is no such process, ``""`` if nothing tells."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except (PermissionError, OverflowError):
        pass  # of another user
    try:
        # After the name, which is in brackets and may hold anything: the state first, the start as the 20th.
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        return None if fields[0] in "ZX" else fields[19]
    except (OSError, IndexError):
        return ""
