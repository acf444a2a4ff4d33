"""AuditLog: appends entries to a file, one writer at a time, and survives a writer that dies in the middle.

Nothing in the file is ever changed, so that it may carry the append-only attribute (``chattr +a``). A part of a line
that a crash left stays; the next entry says how long it is and what its hash is. Beside the log ``NAME.state`` holds
how many entries there are, the hash of the last one and, of a sealed log, the key of the next seal.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import pwd
import secrets
import socket
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nemorl.base.files.atomic import replace_text, storing
from nemorl.base.files.jsonl import dumps
from nemorl.base.files.ownership import NO_FLOCK
from nemorl.base.text.secrets import redacted_json
from nemorl.errors import StorageError, UsageError

from nemorl_trust.audit.chain import GENESIS, KEY_BYTES, Entry, SealingKey, debris_of

LOCK_S = 30.0
"""Longest wait for another writer; one entry takes milliseconds."""
POLL_S = 0.01
BLOCK = 65_536


@dataclass(frozen=True)
class State:
    """State of a log as its writer wrote it last."""

    count: int
    hash: str
    key: str | None = None
    """Hexadecimal key of the seal of entry ``count``."""

    @classmethod
    def read(cls, path: Path) -> State | None:
        """``None`` where there is none, or what is there is damaged."""
        try:
            found = cls(**json.loads(path.read_text(encoding="utf-8")))
            is_whole = type(found.count) is int and isinstance(found.hash, str)
            return found if is_whole and len(bytes.fromhex(found.key or "")) in (0, KEY_BYTES) else None
        except (OSError, ValueError, TypeError):
            return None

    @property
    def sealing_key(self) -> SealingKey | None:
        return None if self.key is None else SealingKey(self.count, bytes.fromhex(self.key))


class AuditLog:
    """One file of entries."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.state_path = path.with_name(f"{path.name}.state")

    def append(self, event: str, facts: Mapping[str, Any]) -> Entry:
        """Write one entry; it is on the disk when this returns.

        Args:
            event: What happened, e.g. ``run_started``.
            facts: Plain data about it. No texts of models and no secrets.

        Raises:
            StorageError: It cannot be written, or another writer does not end.
        """
        with storing(self.path), self._locked() as file:
            return self._append(file, event, facts)

    def check(self) -> None:
        """
        Raises:
            StorageError: Nothing can be appended.
        """
        with storing(self.path), self._locked():
            pass

    def seal(self) -> SealingKey:
        """Seal all entries from the next one on.

        Returns:
            The key that verifies them. It is kept nowhere here: who has it could write the log anew.

        Raises:
            UsageError: It is sealed already.
        """
        with storing(self.path), self._locked() as file:
            count, last, _ = self._end(file)
            state = State.read(self.state_path)
            if state is not None and state.key is not None:
                raise UsageError(f"{self.path} is sealed already", fix="verify it with the key that was given then")
            key = SealingKey(count, secrets.token_bytes(KEY_BYTES))
            self._keep(State(count, last, key.secret.hex()))
            self._append(file, "log_sealed", {})
            return key

    def _append(self, file: int, event: str, facts: Mapping[str, Any]) -> Entry:
        count, last, left = self._end(file)
        state = State.read(self.state_path)
        gap = b"\n" if left and not left.endswith(b"\n") else b""
        is_whole = Entry.read(left) is not None  # only its newline is missing
        debris = debris_of(left + gap) if left and not is_whole else None
        entry = Entry(
            n=count, time=round(time.time(), 3), host=socket.gethostname(), user=user_name(), uid=os.getuid(),
            pid=os.getpid(), event=event, facts=json.loads(redacted_json(dumps(facts))), previous=last, debris=debris,
        ).chained()  # fmt: skip
        key = state.sealing_key.at(count) if state is not None and state.sealing_key is not None else None
        entry = entry if key is None else entry.sealed(key.secret)
        _write(file, gap + entry.line() + b"\n")
        os.fsync(file)
        self._keep(State(count + 1, entry.hash, None if key is None else key.at(count + 1).secret.hex()))
        return entry

    def _end(self, file: int) -> tuple[int, str, bytes]:
        """Number of the next entry, hash of the last one, and what follows that line.

        Where the end is not as the state knows it, entries were cut off, changed or added: the chain goes on as the
        state says, and the break stays for everyone to see.
        """
        last, left = _last_entry(file)
        count, digest = (0, GENESIS) if last is None else (last.n + 1, last.hash)
        before = (last.n, last.previous) if last is not None else (count, digest)  # a writer died before its state
        state = State.read(self.state_path)
        if state is not None and (state.count, state.hash) not in ((count, digest), before):
            count, digest = state.count, state.hash
        return count, digest, left

    def _keep(self, state: State) -> None:
        replace_text(self.state_path, json.dumps(asdict(state)))
        self.state_path.chmod(0o600)

    @contextmanager
    def _locked(self) -> Iterator[int]:
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            _require_own(file, self.path)
            _lock(file, self.path)
            try:
                yield file
            finally:
                fcntl.flock(file, fcntl.LOCK_UN)  # a child that was forked meanwhile has the file open as well
        finally:
            os.close(file)


def user_name(uid: int | None = None) -> str:
    """Name of a user (unset: of this process's), by the system's list."""
    uid = os.getuid() if uid is None else uid
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _require_own(file: int, path: Path) -> None:
    found = os.fstat(file)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid() or found.st_nlink != 1:
        raise StorageError(
            f"{path} is no file of {user_name()} alone (owner {user_name(found.st_uid)}, {found.st_nlink} names)",
            fix="move it away; a new one is begun",
        )


def _lock(file: int, path: Path) -> None:
    until = time.monotonic() + LOCK_S
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until:
                raise StorageError(
                    f"{path} has been locked by another process for {LOCK_S:.0f} s", fix=f"find it: fuser {path}"
                ) from None
            time.sleep(POLL_S)
        except OSError as error:
            if error.errno not in NO_FLOCK:
                raise
            why = f"the file system of {path} has no locks ({errno.errorcode.get(error.errno or 0)})"
            raise StorageError(why, fix="keep the audit log on another one (NEMORL_AUDIT=FOLDER)") from error
        else:
            return


def _last_entry(file: int) -> tuple[Entry | None, bytes]:
    """The last entry of a file, and what follows its line. Reads backwards, as far as it has to."""
    start = os.fstat(file).st_size
    tail = b""
    while start > 0:
        size = min(BLOCK, start)
        start -= size
        tail = os.pread(file, size, start) + tail
        # The first line may have begun earlier.
        lines = tail.split(b"\n")
        whole = lines if start == 0 else lines[1:]
        for place in range(len(whole) - 1, -1, -1):
            entry = Entry.read(whole[place]) if whole[place] else None
            if entry is not None:
                is_ended = place < len(whole) - 1
                return entry, b"\n".join(whole[place + 1 :]) if is_ended else whole[place]
    return None, tail


def _write(file: int, text: bytes) -> None:
    rest = memoryview(text)
    while rest:
        rest = rest[os.write(file, rest) :]
