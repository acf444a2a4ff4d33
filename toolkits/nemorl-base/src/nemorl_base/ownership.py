"""One owner per run directory: who writes there holds a lock, and says who it is.

The lock is the kernel's (``flock``), so it ends with its process, however that ends. Where a file system has none, the
record itself is the lock: it is made by a hard link, which succeeds once, and holds as long as the process that it
names is alive on its machine.
"""

from __future__ import annotations

import errno
import fcntl
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
from typing import Any

from nemorl_base.errors import RunInUseError
from nemorl_base.files import remove_drafts, storing
from nemorl_base.secrets import redacted

FILE = "run.lock"
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
            return cls(**json.loads(text))
        except (ValueError, TypeError):
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
    """The right to write in a folder, from construction until :meth:`close` or the end of the process."""

    def __init__(self, folder: Path) -> None:
        """
        Raises:
            RunInUseError: Another process has it; says which, since when, and how to proceed.
        """
        self.folder = folder
        self._path = folder / FILE
        self._record = json.dumps(asdict(Owner.me())).encode()
        self._file: Any = None
        own = self._path.with_name(f".{FILE}.{socket.gethostname()}.{os.getpid()}")
        try:
            with storing(self._path):
                own.write_bytes(self._record)
                self.is_locked = _has_flock(own)
            if self.is_locked:
                self._lock()
            else:
                self._link(own)
        finally:
            with suppress(OSError):  # the next owner removes it
                own.unlink()
        self._tidy()

    def _tidy(self) -> None:
        """Remove what owners, and processes that wanted to be, left half-written when they were killed."""
        remove_drafts(self.folder)
        with suppress(OSError):
            for left in self.folder.glob(f".{FILE}.*{socket.gethostname()}.*"):
                pid = left.name.rpartition(".")[2]
                if pid.isdecimal() and _start_of(int(pid)) is None:
                    left.unlink(missing_ok=True)

    def close(self) -> None:
        """Give it up. Calling it twice is harmless.

        A disk that refuses leaves the record, not the lock: whoever comes next finds that its owner is gone.
        """
        with suppress(OSError):
            if self.is_locked and not self._file.closed:
                with self._file:
                    self._file.truncate(0)
            elif not self.is_locked and self._read() == self._record:
                self._path.unlink()

    def _lock(self) -> None:
        with ExitStack() as undo, storing(self._path):
            number = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            self._file = undo.enter_context(os.fdopen(number, "rb+", 0))
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise self._held(self._holder()) from None
            # A child that was forked would keep the lock after its parent's death.
            os.register_at_fork(after_in_child=self._file.close)
            self._file.truncate(0)
            self._file.write(self._record)
            undo.pop_all()

    def _holder(self) -> Owner | None:
        """The owner by the record, which follows the lock within moments."""
        for _ in range(20):
            self._file.seek(0)
            holder = Owner.read(self._file.read().decode(errors="replace"))
            if holder is not None:
                return holder
            time.sleep(0.05)
        return None

    def _link(self, own: Path) -> None:
        takes_over = False
        while True:
            with suppress(FileNotFoundError):  # another claimant was quicker to take a stale record away
                try:
                    os.link(own, self._path)
                except FileExistsError:
                    self._remove_stale()
                    takes_over = True
                else:
                    break
        if takes_over:  # another may have judged the same record, and taken this one away instead: it puts it back
            time.sleep(0.5)
            if self._read() != self._record:
                raise self._held(Owner.read(self._read().decode(errors="replace")))

    def _read(self) -> bytes:
        return self._path.read_bytes() if self._path.is_file() else b""

    def _remove_stale(self) -> None:
        """Take away the record of a process that has ended; one that another claimant replaced meanwhile goes back."""
        text = self._path.read_bytes()
        holder = Owner.read(text.decode(errors="replace"))
        if text and (holder is None or not holder.is_gone):
            raise self._held(holder)
        aside = self._path.with_name(f".{FILE}.stale.{socket.gethostname()}.{os.getpid()}")
        os.rename(self._path, aside)
        if aside.read_bytes() != text:
            with suppress(FileExistsError):
                os.link(aside, self._path)
        aside.unlink()

    def _held(self, holder: Owner | None) -> RunInUseError:
        if holder is None:
            who, fix = "another process, which left no name", f"wait for it, or look for it with: fuser {self._path}"
        elif self.is_locked and holder.is_gone:
            who, fix = f"a child of {holder} (which has ended)", f"end it; this finds it: fuser {self._path}"
        elif self.is_locked or holder.host == socket.gethostname():
            who, fix = str(holder), f"wait for it or stop it (kill {holder.pid}), or give this run another run_dir"
        else:
            who, fix = str(holder), f"wait for it; if it has ended, remove {self._path}"
        return RunInUseError(f"{self.folder} is in use by {who}", fix=fix)


def _has_flock(file: Path) -> bool:
    """The file system of a file has locks."""
    with file.open("rb") as opened:
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in NO_FLOCK:
                return False
            raise
    return True


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
