"""The process that starts runs: an interpreter of its own (``inside/``) that forks and runs no program itself."""

from __future__ import annotations

import os
import socket
import subprocess
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path

from nemorl_trust.isolation import CONFINEMENT

INSIDE = Path(__file__).parent / "inside"
ENVIRONMENT = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "PYTHONIOENCODING": "utf-8", "OMP_NUM_THREADS": "1"}
"""All that a program sees of the environment: no tokens, no keys."""


class Server:
    """Started at the first run, and again when it has died. Safe to use from many threads."""

    def __init__(self, python: str) -> None:
        self._python = python
        self._lock = threading.RLock()
        self._process: _Process | None = None

    def start(self, fds: Sequence[int]) -> _Process:
        """Begin a run that gets these descriptors, in the process that is returned.

        Raises:
            OSError: no process can be started.
        """
        with self._lock:
            if self._process is None or not self._process.is_alive():
                self.close()
                self._process = _Process(self._python)
            self._process.send(fds)
            return self._process

    def replace(self, process: _Process) -> None:
        """End a process that begins no run: it stands still. The next run starts another, if none has done so."""
        with self._lock:
            if self._process is process:
                self.close()

    def close(self) -> None:
        """End it. What it has started ends by itself, and the next run starts a new one."""
        with self._lock:
            if self._process is not None:
                self._process.end()
                self._process = None


class _Process:
    def __init__(self, python: str) -> None:
        self._requests, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                [python, "-I", "-B", "-X", "utf8", str(INSIDE), str(theirs.fileno()), str(CONFINEMENT)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                env=ENVIRONMENT,
            )
        self._process = process
        self.end = weakref.finalize(self, _end, process, self._requests, os.getpid())

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def send(self, fds: Sequence[int]) -> None:
        try:
            socket.send_fds(self._requests, [b"r"], list(fds))
        except (BrokenPipeError, ConnectionResetError):  # it died just now: nothing of this run begins
            self._process.wait()


def _end(process: subprocess.Popen[bytes], requests: socket.socket, owner: int) -> None:
    requests.close()
    if os.getpid() == owner:  # not in a fork of the trainer
        process.kill()
        process.wait()
