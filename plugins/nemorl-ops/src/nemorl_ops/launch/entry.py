"""The run in a pod: ``python -m nemorl_ops.launch.entry --nodes 2 -- COMMAND``, and ``… --stop`` before the pod goes.

It waits until the Ray cluster of this machine, which somebody else has started, has all of its nodes.

A run that is asked to stop saves and ends with code 0, as a finished one does. Whoever starts pods again must tell them
apart: here a run that was asked to stop ends with code 75, so that the job is tried again and the run continues.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from nemorl.errors import DeadlineError, ResourceError

from nemorl_ops.launch.lives import Lives

CONTINUE = 75
"""EX_TEMPFAIL of sysexits.h: try again later."""
MARK = "nemorl_ops.launch.entry"
POD = "NEMORL_POD"
"""Environment variable with the pod's name: where pods share their node's process ids, one sees the runs of others."""
WORKER, IDLE = b"ray::", b"ray::IDLE"
"""How Ray names the processes of actors, and those that wait to be one."""
POLL_S = 0.5
JOB_CONFIG = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""In which Ray tells the driver of a job what job it is."""
STOPPED_S = 60.0
"""How long it may take Ray to end a job that shall stop."""


def run(command: Sequence[str]) -> int:
    """Run a command, pass SIGTERM on, and return its exit code, or 75 if it was asked to stop and saved."""
    started: list[subprocess.Popen[bytes]] = []
    stopped: list[int] = []

    def stop(number: int, _frame: object) -> None:
        stopped.append(number)
        for process in started:
            _ask(process)

    # Before the command starts: a signal that comes meanwhile would end this process and leave the run behind.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    process = subprocess.Popen(command, start_new_session=True)
    with _held_back(signal.SIGTERM, signal.SIGINT):  # each is told once: a second SIGTERM ends a run before it saves
        started.append(process)
        for _ in stopped:
            _ask(process)
    code = process.wait()
    if code == 0 and stopped:
        return CONTINUE
    return code if code >= 0 else 128 - code


def _ask(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        process.send_signal(signal.SIGTERM)


@contextmanager
def _held_back(*signals: signal.Signals) -> Iterator[None]:
    """These signals come when the block is through."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def stop(limit_s: float) -> None:
    """Ask runs of this pod to save, and wait until they and their workers here have ended, or ``limit_s`` is over."""
    for pid in _processes():
        with suppress(ProcessLookupError):
            if _is_entry(pid):
                os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + limit_s
    while any(_is_entry(pid) or _is_worker(pid) for pid in _processes()):
        if time.monotonic() > deadline:
            return
        time.sleep(POLL_S)


def _is_entry(pid: int) -> bool:
    words = _read(pid, "cmdline").split(b"\0")
    is_run = MARK.encode() in words and b"--stop" not in words
    return is_run and pid != os.getpid() and _pod(pid) == _pod(os.getpid())


def _is_worker(pid: int) -> bool:
    command = _read(pid, "cmdline")
    return command.startswith(WORKER) and not command.startswith(IDLE)


def _processes() -> list[int]:
    return [int(path.name) for path in Path("/proc").glob("[0-9]*")]


def _pod(pid: int) -> list[bytes]:
    return [each for each in _read(pid, "environ").split(b"\0") if each.startswith(f"{POD}=".encode())]


def _read(pid: int, file: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{file}").read_bytes()
    except OSError:
        return b""


def await_nodes(count: int, limit_s: float) -> None:
    """Wait until Ray's cluster of this machine has so many nodes.

    Raises:
        DeadlineError: it has fewer; says how many.
    """
    from nemorl_ops.launch.ray_part import ClusterView

    deadline = time.monotonic() + limit_s
    joined = 0
    while joined < count:
        if time.monotonic() > deadline:
            raise DeadlineError(f"waited {limit_s:.0f} s for {count} nodes of Ray, of which {joined} are there")
        with suppress(ConnectionError):  # its head is still starting
            view = ClusterView("auto", {})
            joined = sum(view.nodes().values())
            view.close()
        time.sleep(POLL_S)


def main(arguments: Sequence[str] | None = None) -> int:
    """``--stop SECONDS``, or ``--`` and the command of the run."""
    parser = argparse.ArgumentParser(prog=f"python -m {MARK}", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--stop", type=float, metavar="SECONDS", help="Ask the run of this pod to save, and wait.")
    parser.add_argument("--nodes", type=int, default=0, help="Wait for so many nodes of Ray first.")
    parser.add_argument("--run-dir", type=Path, help="Of the run: where it gets nowhere, the job ends.")
    parser.add_argument("--launch", default="", help="Names the submission.")
    parser.add_argument("--join-s", type=float, default=600.0, help="At most so long.")
    parser.add_argument("command", nargs="*", help="Of the run, after --.")
    given = parser.parse_args(arguments)
    if given.stop is not None:
        stop(given.stop)
        return 0
    if given.nodes:
        await_nodes(given.nodes, given.join_s)
    lives = Lives(given.run_dir, given.launch) if given.run_dir is not None else None
    try:
        if lives is not None:
            lives.begin()
    except ResourceError as error:
        sys.stderr.write(f"error: {error}\n")
        return end_job()
    code = run(given.command)
    if lives is not None and code == CONTINUE:
        lives.asked()
    return code


def end_job() -> int:
    """End Ray's job as stopped, after which KubeRay starts no other cluster, as it does after a failure.

    Returns:
        The exit code, where this is no job of Ray's.
    """
    config = json.loads(os.environ.get(JOB_CONFIG) or "{}")
    name = config.get("metadata", {}).get("job_submission_id")
    if name is None:
        return 1
    asked = subprocess.run(["ray", "job", "stop", "--no-wait", name], check=False)  # it ends this process, too
    if asked.returncode == 0:
        time.sleep(STOPPED_S)
    return 1


if __name__ == "__main__":
    sys.exit(main())
