"""The parent of an agent's program: starts it, waits for it, and with its end everything that it started ends.

Runs as a script of its own, with the standard library only: ``python -I -S keeper.py DESCRIPTOR LIMITS COMMAND…``. The
descriptor is one end of a socket pair. When the program has ended, or the other end of the socket is closed (the
episode is over, or nemorl has died), every process that the program started is killed, also those that left its group
or ignore signals: on Linux orphans become children of this process (``PR_SET_CHILD_SUBREAPER``). Then one line of JSON
with the exit code is written to the socket.
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import socket
import sys
import time
from contextlib import suppress

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
KILL_ROUNDS, ROUND_S = 10_000, 0.002
"""Of killing what is left, so that a program that starts processes without end does not hold up its episode forever."""


def main() -> int:
    descriptor, limits, *command = sys.argv[1:]
    control = socket.socket(fileno=int(descriptor))
    os.set_inheritable(control.fileno(), False)
    adopt_orphans()
    failed, told = os.pipe()
    child = os.fork()
    if child == 0:
        start(command, json.loads(limits), told)
    os.close(told)
    with suppress(OSError):
        os.setpgid(0, 0)  # a signal to the program's group is not for this process
    ended = wait(child, control)
    kill_all(child)
    with os.fdopen(failed, "rb") as file:
        why = file.read().decode(errors="replace")
    said = {"returncode": ended, "could_not_start": why or None}
    with suppress(OSError):
        control.sendall(json.dumps(said).encode() + b"\n")
    return 0


def start(command: list[str], limits: dict[str, int], told: int) -> None:
    """Become the program. Does not return."""
    try:
        os.setsid()
        die_with_parent()
        for name, value in limits.items():
            resource.setrlimit(getattr(resource, name), (value, value))
        os.execvp(command[0], command)
    except BaseException as error:
        os.write(told, f"{type(error).__name__}: {error}".encode())
    os._exit(127)


def wait(child: int, control: socket.socket) -> int | None:
    """The program's exit code, below 0 for a signal; ``None`` where it was ended from outside."""
    awake, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    waiting = select.poll()  # select() knows no descriptors from 1024 on, which this one has where many episodes run
    waiting.register(awake, select.POLLIN)
    waiting.register(control.fileno(), select.POLLIN)
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        reap(child)
        ready = [descriptor for descriptor, _ in waiting.poll()]
        if awake in ready:
            os.read(awake, 4096)
        if control.fileno() in ready and not hears(control):
            return None


def hears(control: socket.socket) -> bool:
    """The other end is still there."""
    try:
        return bool(control.recv(4096))
    except OSError:
        return False


def reap(child: int) -> None:
    """Forget orphans that have ended; the program itself is waited for by ``wait``."""
    for pid in children():
        if pid != child:
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


def kill_all(child: int) -> None:
    """Returns when nothing is left that the program started."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)
    for _ in range(KILL_ROUNDS):
        for pid in children():
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            time.sleep(ROUND_S)


def children() -> list[int]:
    """Direct children, on Linux; elsewhere nobody says."""
    me = os.getpid()
    with suppress(OSError), open(f"/proc/self/task/{me}/children") as file:
        return [int(pid) for pid in file.read().split()]
    found = []
    with suppress(OSError):
        for name in os.listdir("/proc"):
            with suppress(OSError, ValueError), open(f"/proc/{int(name)}/stat") as file:
                if int(file.read().rpartition(")")[2].split()[1]) == me:
                    found.append(int(name))
    return found


def adopt_orphans() -> None:
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent() -> None:
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(option, ctypes.c_ulong(value), 0, 0, 0)


if __name__ == "__main__":
    sys.exit(main())
