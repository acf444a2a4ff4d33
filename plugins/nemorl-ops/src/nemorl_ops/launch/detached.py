"""Start a program that outlives whoever asks: ``python -m nemorl_ops.launch.detached`` where it shall run.

What to run comes as JSON on standard input, environment included: values of secrets are in no argument and no file.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from nemorl.base.files.ownership import Owner

NOT_SHARED = 3
"""Exit code where the folder of the launch is not on this machine."""


def start(command: list[str], log: Path, directory: Path, environment: dict[str, str]) -> dict[str, Any]:
    """Start ``command`` in a session of its own.

    Returns:
        ``pid`` and what tells it from a later process with that number.
    """
    with log.open("ab") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd=directory,
            env={**os.environ, **environment},
            start_new_session=True,
        )
    return {"pid": process.pid, "identity": identity(process.pid)}


def find(words: str) -> dict[str, Any] | None:
    """The process that ``start`` has started with these words in its arguments; ``None`` where none lives."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        pid = int(path.parent.name)
        try:
            if words.encode() in path.read_bytes() and os.getsid(pid) == pid:
                return {"pid": pid, "identity": identity(pid)}
        except OSError:
            continue
    return None


def identity(pid: int) -> str:
    """Of a process: the machine's boot and the process's start; empty where there is none."""
    try:
        start_ticks = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""
    return f"{Owner.me().boot_id}:{start_ticks}"


def is_alive(handle: dict[str, Any]) -> bool:
    """Whether the process that ``start`` described still runs."""
    known = str(handle["identity"])
    return known != "" and identity(int(handle["pid"])) == known


def kill(handle: dict[str, Any]) -> None:
    """End the process, and all that it and its children started, at once.

    Each is stopped before its children are looked up, so that none can start another, or go on with its next line,
    because a child of it has ended.
    """
    found: list[int] = []
    level = [int(handle["pid"])] if is_alive(handle) else []
    while level := [number for number in level if _signalled(number, signal.SIGSTOP)]:
        found += level
        level = _children(level)
    for number in found:
        _signalled(number, signal.SIGKILL)


def _signalled(number: int, kind: signal.Signals) -> bool:
    """Whether there was such a process, of ours."""
    try:
        os.kill(number, kind)
    except OSError:
        return False
    return True


def _children(parents: list[int]) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) in parents:
            found.append(int(path.parent.name))
    return found


def main() -> None:
    """One request on standard input, one answer on standard output."""
    request = json.load(sys.stdin)
    verb = request.pop("verb")
    if verb == "start":
        if not Path(request["log"]).parent.is_dir():
            print(f"there is no {Path(request['log']).parent}", file=sys.stderr)
            sys.exit(NOT_SHARED)
        answer: Any = start(
            request["command"], Path(request["log"]), Path(request["directory"]), request["environment"]
        )
    elif verb == "alive":
        answer = is_alive(request["handle"])
    elif verb == "find":
        answer = find(request["words"])
    else:
        kill(request["handle"])
        answer = None
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
