"""The end of a command: a signal stops it; threads and processes that a plugin forgot are named, and hold nobody up.

Python waits for every thread that is no daemon, and a pipe stays open as long as a forked child has it: a run that has
finished would hang, in a job that is paid for.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from nemorl.base.process.stopping import GracefulStop
from nemorl.errors import Interrupted

from nemorl_cli.terminal import say

LINGER_S = 10.0
"""Time for threads to end by themselves once the command is over; for processes to end that are asked to."""
POLL_S = 0.05
OWN_ENDING = (b"multiprocessing", b"ray::", b"raylet")
"""In command lines of processes that end by themselves when this one does."""


class PromptStop(GracefulStop):
    """Inside the block, the first signal raises :class:`Interrupted`; the second acts as if we were not here."""

    name: str | None = None
    """Name of the signal that came."""

    def __init__(self) -> None:
        super().__init__(self._interrupt)

    def _interrupt(self, name: str) -> None:
        self.name = name
        raise Interrupted(f"received {name}")


@dataclass(frozen=True)
class Others:
    """Threads and child processes that were there before the command, and outlive it: a job script that starts a
    monitor and then does ``exec nemorl`` makes it a child of the command."""

    threads: frozenset[threading.Thread]
    processes: frozenset[int]

    @classmethod
    def now(cls) -> Others:
        return cls(frozenset(threading.enumerate()), frozenset(_children()))


def leave(code: int, others: Others) -> None:
    """Exit with a code, also where threads or forked children of the command go on."""
    threads = _lingering(LINGER_S, others.threads)
    for thread in threads:
        say(f"warning: the thread {thread.name!r} does not end{_place(thread)}; the command ends without it", err=True)
    for pid, command in _end([child for child in _forgotten() if child[0] not in others.processes]):
        say(f"warning: process {pid} was left behind and has been ended: {command}", err=True)
    if threads:
        sys.stdout.flush()
        sys.stderr.flush()
        ctypes.CDLL(None)._exit(code)
    sys.exit(code)


def _lingering(patience_s: float, others: frozenset[threading.Thread]) -> list[threading.Thread]:
    """Threads but for ``others`` for which Python would wait, and that have not ended in time."""
    deadline = time.monotonic() + patience_s
    waiting = [each for each in threading.enumerate() if not each.daemon and each not in others]
    for thread in waiting:
        thread.join(max(0.0, deadline - time.monotonic()))
    return [thread for thread in waiting if thread.is_alive()]


def _place(thread: threading.Thread) -> str:
    """Whose code a thread runs: the outermost that is none of Python's own."""
    frame, found = sys._current_frames().get(thread.ident or 0), ""
    while frame is not None:
        if frame.f_globals.get("__name__") not in ("threading", "concurrent.futures.thread"):
            found = f" (it runs {frame.f_code.co_qualname}, {frame.f_code.co_filename}, line {frame.f_lineno})"
        frame = frame.f_back
    return found


def _children() -> Iterator[int]:
    """Processes of this one. Linux only: elsewhere, none are found."""
    for listing in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):
            yield from map(int, listing.read_text().split())


def _forgotten() -> Iterator[tuple[int, str]]:
    """Those that live on in its session, and their commands. One that has ended, or has only begun, has none yet."""
    for pid in _children():
        with suppress(OSError):
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            if command and os.getsid(pid) == os.getsid(0) and not any(mark in command for mark in OWN_ENDING):
                yield pid, command.replace(b"\0", b" ").decode(errors="replace").strip()[:200]


def _end(children: list[tuple[int, str]]) -> list[tuple[int, str]]:
    """Ask them to end, and after a while make them."""
    for number, patience_s in ((signal.SIGTERM, LINGER_S / 3), (signal.SIGKILL, LINGER_S / 3)):
        for pid, _ in children:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        deadline = time.monotonic() + patience_s
        while time.monotonic() < deadline and any(not _has_ended(pid) for pid, _ in children):
            time.sleep(POLL_S)
    return children


def _has_ended(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return True
