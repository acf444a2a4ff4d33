"""Tries what a sandbox must prevent, and finds the best one that this machine permits."""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from nemorl.errors import PluginError

from nemorl_tasks.code.sandbox import Limits, Mode, Result, Sandbox

MODES: Sequence[Mode] = ("namespaces", "landlock", "limits")
"""Best first."""
GUARANTEES = {
    "network": "no network",
    "writes": "no writes outside its folder",
    "reads": "no reads of your files",
    "signals": "no signals to other processes",
    "processes": "a limit on its processes",
    "memory": "a limit on its memory",
    "hidden": "no memory outside that limit (shared segments, memfd)",
    "calls": "no rare system calls (io_uring, bpf, keys, tracing, …)",
}
"""Finding of a probe -> in words."""
RARE_CALLS = {
    "x86_64": (425, 321, 298, 248, 250, 323, 272, 101, 165),
    "aarch64": (425, 280, 241, 217, 219, 282, 97, 117, 40),
}
"""io_uring_setup, bpf, perf_event_open, add_key, keyctl, userfaultfd, unshare, ptrace, mount."""
OLDEST_PYTHON = (3, 10)
ATTEMPTS = 64
"""Processes that the probe tries to start; the limit it runs under is far below."""

_PROBE = f"""
import ctypes, errno, json, os, resource, signal, socket, sys
found = {{}}
outside, pid = sys.argv[1], int(sys.argv[2])
def prevented(attempt):
    try:
        attempt()
    except (OSError, MemoryError):
        return True
    return False
def fork_often():
    for _ in range({ATTEMPTS}):
        if os.fork() == 0:
            signal.pause()
def unknown(number):
    return libc.syscall(ctypes.c_long(number), -1, -1, -1, -1, -1) == -1 and ctypes.get_errno() == errno.ENOSYS
def connect():
    with socket.socket() as s:
        s.settimeout(0.2)
        s.connect(("127.0.0.1", int(sys.argv[3])))
found["network"] = prevented(socket.socket) or (
    all(name == "lo" for _, name in socket.if_nameindex()) and prevented(connect)
)
found["writes"] = prevented(lambda: open(outside, "a"))
found["reads"] = prevented(lambda: open(outside))
found["signals"] = prevented(lambda: os.kill(pid, 0))
found["memory"] = prevented(lambda: bytearray(1 << 33))
if sys.platform == "linux":
    libc = ctypes.CDLL(None, use_errno=True)
    found["hidden"] = libc.shmget(0, 4096, 0o1600) == -1 and prevented(lambda: os.memfd_create("probe"))
    found["calls"] = all(map(unknown, {RARE_CALLS!r}.get(os.uname().machine, (39, 172))))
open("own", "w").close()
found["processes"] = prevented(fork_often)
print(json.dumps(found))
"""


def interpreter_folders(python: str) -> tuple[str, list[str]]:
    """The real path of an interpreter and the folders that it reads."""
    code = (
        f"import json, sys; assert sys.version_info >= {OLDEST_PYTHON}, 'it is older than Python 3.10'; "
        "print(json.dumps([sys.executable, sys.prefix, sys.base_prefix, sys.exec_prefix]))"
    )
    try:
        found = subprocess.run([python, "-I", "-c", code], capture_output=True, text=True, check=True, timeout=60)
    except (OSError, subprocess.SubprocessError) as error:
        raise PluginError(
            f"the code environment cannot run the interpreter {python!r}: {error}",
            fix="set environment.python to the bin/python of a Python 3.10 environment or newer, or leave it unset",
        ) from error
    executable, *prefixes = json.loads(found.stdout)
    real = os.path.realpath(executable)
    folders = [*prefixes, str(Path(real).parents[1])]
    return executable, [folder for folder in dict.fromkeys(folders) if not folder.startswith("/usr")]


def best_sandbox(limits: Limits, python: str | None, *, allow_weaker: bool, modes: Sequence[Mode] = MODES) -> Sandbox:
    """The first mode that gives all guarantees.

    Args:
        limits: Of every program.
        python: The interpreter of programs. Unset: the one that runs this.
        allow_weaker: Settle for the mode that gives the most.
        modes: What to try, best first.

    Raises:
        PluginError: none does, and ``allow_weaker`` is not set; or no program can be run at all.
    """
    executable, readable = interpreter_folders(python or os.path.realpath(sys.executable))
    tried: list[tuple[Sandbox, dict[str, bool], str]] = []
    for filters_calls in (True, False):
        for mode in modes:
            sandbox = Sandbox(limits, mode=mode, python=executable, readable=readable, filters_calls=filters_calls)
            holds, reason = probe(sandbox)
            if all(holds.values()):
                return sandbox
            sandbox.close()  # it opens again when it is used
            tried.append((sandbox, holds, reason))
        usable = [(sandbox, holds) for sandbox, holds, reason in tried if not reason]
        if usable:
            break  # without the filter would be no better
    if not usable:
        reasons = "; ".join(f"{sandbox.mode}: {reason}" for sandbox, _, reason in tried)
        raise PluginError(f"the code environment can run no program here ({reasons})", fix="check environment.python")
    sandbox, holds = max(usable, key=lambda item: sum(item[1].values()))
    missing = ", ".join(GUARANTEES[name] for name, held in holds.items() if not held)
    if allow_weaker:
        logging.getLogger(__name__).warning("code runs in a weaker sandbox (%s) without: %s", sandbox.mode, missing)
        return sandbox
    reasons = "; ".join(f"{sandbox.mode}: {reason}" for sandbox, _, reason in tried if reason)
    raise PluginError(
        f"this machine cannot isolate the policy's code. Missing: {missing}" + (f" ({reasons})" if reasons else ""),
        fix="allow user namespaces (in Docker: --security-opt seccomp=unconfined), or, where nothing of value can be "
        "reached from this machine, set environment.allow_weaker_sandbox: true",
    )


def probe(sandbox: Sandbox) -> tuple[dict[str, bool], str]:
    """Which guarantees hold, and why the sandbox does not run at all if so."""
    trial = sandbox.within(Limits(wall_s=30.0, memory_mib=512, processes=16, output_kib=64, disk_mib=16))
    with (
        tempfile.NamedTemporaryFile(prefix="nemorl-probe-") as outside,
        socket.create_server(("127.0.0.1", 0)) as server,
    ):
        os.chmod(outside.name, 0o666)
        port = str(server.getsockname()[1])
        result: Result = trial.run({"probe.py": _PROBE}, ["probe.py", outside.name, str(os.getpid()), port])
    try:
        found: dict[str, bool] = json.loads(result.stdout)
    except ValueError:
        return dict.fromkeys(GUARANTEES, False), (result.stderr or result.outcome).strip()[-300:]
    return {name: bool(found.get(name)) for name in GUARANTEES}, ""
