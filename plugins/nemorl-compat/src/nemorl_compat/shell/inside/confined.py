"""Runs bash on a script with nothing: no program to start, no file to write, no network, no process of others.

For a fresh interpreter (``python -I -S -B confined.py``), on Linux, with the standard library alone. What to do comes
as JSON on standard input, what was found goes out as JSON: ``records``, the end of ``errors`` (base64) and ``end``.
"""

from __future__ import annotations

import base64
import json
import os
import resource
import select
import signal
import sys
import time
from typing import Any

RECORDS_FD = 200
FIRST_USER = 0x70000000
"""User ids from here on belong to nobody."""
PROCESSES = 32
ERROR_BYTES = 1 << 14
CANNOT_CONFINE = 125
LIMITS = {
    "RLIMIT_AS": 128 << 20,
    "RLIMIT_FSIZE": 0,
    "RLIMIT_NOFILE": 256,
    "RLIMIT_CORE": 0,
}


def main() -> None:
    spec = json.load(sys.stdin)
    sys.path.append(spec["confinement"])
    import libc

    libc.prctl(libc.PR_SET_CHILD_SUBREAPER, 1)  # what the script leaves behind becomes a child of this process
    libc.prctl(libc.PR_SET_PDEATHSIG, signal.SIGKILL)
    records, records_in = os.pipe()
    errors, errors_in = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            _become_bash(spec, records_in, errors_in)
        except Exception as error:
            os.write(2, f"{type(error).__name__}: {error}".encode())
        os._exit(CANNOT_CONFINE)
    os.close(records_in)
    os.close(errors_in)
    said, end = _listen(child, records, errors, time.monotonic() + spec["wall_s"], spec["records_bytes"])
    _end_all()
    found = {"records": base64.b64encode(said[records]).decode(), "errors": base64.b64encode(said[errors]).decode()}
    sys.stdout.write(json.dumps({**found, "end": end}))


def _listen(child: int, records: int, errors: int, deadline: float, most: int) -> tuple[dict[int, bytes], str]:
    """Output of bash and what it leaves in the background until all have ended, or say too much; how bash ended."""
    said = {records: b"", errors: b""}
    heard, ended = {records, errors}, None
    while heard or ended is None:
        for fd in select.select(list(heard), [], [], 0.02)[0]:
            chunk = os.read(fd, 1 << 16)
            if not chunk:
                heard.remove(fd)
            said[fd] = said[fd] + chunk if fd == records else (said[fd] + chunk)[-ERROR_BYTES:]
        if len(said[records]) > most:
            return said, "too much output"
        if time.monotonic() > deadline:
            return said, "no end"
        if ended is None:
            pid, status = os.waitpid(child, os.WNOHANG)
            ended = os.waitstatus_to_exitcode(status) if pid else None
    return said, "cannot confine" if ended == CANNOT_CONFINE else f"exit {ended}"


def _end_all() -> None:
    """Kills what the script started; children of the killed become ours in turn."""
    path = f"/proc/self/task/{os.getpid()}/children"
    while True:
        with open(path) as file:
            children = file.read().split()
        if not children:
            return
        for pid in map(int, children):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _become_bash(spec: dict[str, Any], records: int, errors: int) -> None:
    """Give up all rights, then become bash. Does not return."""
    import landlock
    import libc
    import seccomp

    null = os.open(os.devnull, os.O_RDWR)
    for fd, target in ((null, 0), (errors, 1), (errors, 2), (records, RECORDS_FD)):
        os.dup2(fd, target)
    os.closerange(3, RECORDS_FD)
    os.chdir(spec["cwd"])
    libc.prctl(libc.PR_SET_PDEATHSIG, signal.SIGKILL)
    for name, value in {**LIMITS, "RLIMIT_CPU": int(spec["wall_s"]) + 1, "RLIMIT_NPROC": _processes()}.items():
        resource.setrlimit(getattr(resource, name), (value, value))
    if os.geteuid() == 0:
        _become_nobody(libc)
    else:
        libc.drop_capabilities()
    libc.prctl(libc.PR_SET_NO_NEW_PRIVS, 1)
    landlock.restrict(spec["readable"], ["/dev/null"])
    seccomp.restrict(may_signal=landlock.version() >= landlock.KNOWS_SIGNALS)
    os.execve(spec["bash"], [spec["bash"], *spec["arguments"]], spec["environment"])


def _processes() -> int:
    """A limit on the processes of this user: those it has, and some."""
    if os.geteuid() == 0:
        return PROCESSES  # a user of its own, see below
    threads = 0
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.stat(f"/proc/{name}").st_uid == os.geteuid():
                threads += len(os.listdir(f"/proc/{name}/task"))
        except OSError:
            continue  # it has ended
    return threads + PROCESSES


def _become_nobody(libc: Any) -> None:
    """Of root's powers only that to read files is left: Landlock says which. The limit on processes holds for it."""
    libc.prctl(libc.PR_SET_KEEPCAPS, 1)
    user = FIRST_USER + os.getpid()
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
    libc.keep_capability(libc.CAP_DAC_READ_SEARCH)


if __name__ == "__main__":
    main()
