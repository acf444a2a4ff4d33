"""The first process of a sandbox: starts the program, waits for it, and with its end everything inside ends.

Signals cannot end it and cannot make it say anything. All are ignored but two, which are blocked and taken out one by
one: ``SIGCHLD``, after which it looks for ended children, and ``SIGALRM``, after which it looks at the clock. Whoever
sends them makes it look, no more.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import libc

WAKERS = (signal.SIGCHLD, signal.SIGALRM)
CANNOT_BE_IGNORED = (signal.SIGKILL, signal.SIGSTOP)
LOOK_S = 0.1


def supervise(who: str, wall_s: float, control: int, own: Sequence[int], party: Callable[[], None]) -> int:
    """Run ``party`` in a child, for ``wall_s`` at most, and write one line to ``control`` about its end.

    Args:
        who: Named in that line.
        wall_s: Seconds of the clock.
        control: Descriptor.
        own: The party's descriptors, which are closed here.
        party: Does not return.

    Returns:
        The exit code of the party, below 256.
    """
    _ignore_signals()
    if sys.platform == "linux":
        libc.prctl(libc.PR_SET_DUMPABLE, 0)  # the program cannot look into this process
        libc.prctl(libc.PR_SET_PDEATHSIG, signal.SIGKILL)
    deadline, parent = time.monotonic() + wall_s, os.getppid()
    child = os.fork()
    if child == 0:
        _heed_signals()
        os.setsid()  # it shares its group with nobody who waits for it
        if sys.platform == "linux":
            libc.prctl(libc.PR_SET_PDEATHSIG, signal.SIGKILL)
        party()
    for fd in (0, 1, 2, *own):
        os.close(fd)
    timed_out = False
    signal.setitimer(signal.ITIMER_REAL, wall_s if sys.platform == "linux" else LOOK_S, LOOK_S)
    while True:
        signal.sigwait(WAKERS)
        if (status := _status_of(child)) is not None:
            break
        timed_out = time.monotonic() >= deadline
        if timed_out or os.getppid() != parent:  # elsewhere nobody is told of a parent's death
            os.kill(child, signal.SIGKILL)
    _kill_group(child)
    returncode = os.waitstatus_to_exitcode(status)
    report(control, who=who, returncode=returncode, timed_out=timed_out)
    return returncode & 0xFF


def report(control: int, **fields: Any) -> None:
    os.write(control, json.dumps(fields).encode() + b"\n")


def _ignore_signals() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, WAKERS)
    for number in signal.valid_signals() - {*WAKERS, *CANNOT_BE_IGNORED}:
        signal.signal(number, signal.SIG_IGN)


def _heed_signals() -> None:
    for number in signal.valid_signals() - {*CANNOT_BE_IGNORED}:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, WAKERS)


def _status_of(child: int) -> int | None:
    """How it ended, or ``None``. Orphans become children of the first process and are waited for too."""
    while True:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in (0, child):
            return status if pid else None


def _kill_group(leader: int) -> None:
    """Where there is no process namespace, children that stayed in the program's group end here."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)
