"""Has bash expand a script where it can start, write and reach nothing: the commands that it would have run.

bash is the only program of the process that runs it (``inside/confined.py``), and every command is answered by the
recorder (``inside/recorder.bash``). Landlock and seccomp shut it off, so this works on Linux alone.
"""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from nemorl.errors import DataError, UsageError
from nemorl_trust.isolation import CONFINEMENT

INSIDE = Path(__file__).with_name("inside")
LIBRARIES = (
    "/lib",
    "/lib32",
    "/lib64",
    "/usr/lib",
    "/usr/lib32",
    "/usr/lib64",
    "/usr/share/locale",
    "/etc/ld.so.cache",
)
"""Paths that bash needs besides itself."""
WALL_S = 10.0
"""Seconds that a script may take; nothing that it calls takes any."""
RECORDS_BYTES = 1 << 22
GRACE_S = 20.0
COUNT = re.compile("[1-9][0-9]{0,6}")
"""Of the words of a record; a script may write records of its own."""
MOST_SCRIPTS = 200
"""Scripts beside it that it may read."""
ERROR_LINES = 3
INSTEAD = "give the YAML that Hydra or the trainer wrote of the run instead of the script"


@dataclass
class Expanded:
    """The course that a script would have taken."""

    commands: list[list[str]] = field(default_factory=list)
    """Words of each command that is a program, as it would have got them"""
    skipped: list[list[str]] = field(default_factory=list)
    """Words of what was answered otherwise than a machine with these programs and files would have"""
    branches: dict[str, str | None] = field(default_factory=dict)
    """Variables that conditions look at, and what they held then; ``None``: they were not set"""
    errors: str = ""
    """The last messages, where it ended with an error"""


def expand(path: Path, variables: Mapping[str, str] | None = None, arguments: Sequence[str] = ()) -> Expanded:
    """The commands of a bash script. Nothing of the environment reaches it but ``variables``; ``HOME`` is ``~``.

    Args:
        path: The script. It may read other ``.sh`` files of its folder, and one folder below.
        variables: What is set when it starts.
        arguments: Its own.

    Raises:
        DataError: it does not end, or says too much.
        UsageError: this machine has no bash, or cannot shut it off.
    """
    found = _run(path.absolute(), dict(variables or {}), list(arguments))
    if found["end"] in ("no end", "too much output"):
        what = f"does not end within {WALL_S:g} s" if found["end"] == "no end" else "runs too many commands"
        raise DataError(f"{path} {what}", fix=INSTEAD)
    expanded = Expanded()
    for kind, words in _records(base64.b64decode(found["records"])):
        if kind == "branch" and len(words) == 3:
            expanded.branches.setdefault(words[0], words[2] if words[1] == "set" else None)
        elif kind == "ran":
            expanded.commands.append(words)
        else:
            expanded.skipped.append(words)
    if found["end"] != "exit 0":
        expanded.errors = _errors(found)
    return expanded


def _run(path: Path, variables: dict[str, str], arguments: list[str]) -> dict[str, Any]:
    bash = shutil.which("bash")
    if bash is None or sys.platform != "linux":
        raise UsageError("scripts are read on Linux, by bash, alone", fix=INSTEAD)
    bash = os.path.realpath(bash)
    spec = {
        "bash": bash,
        "arguments": [str(path), *arguments],
        "cwd": os.getcwd(),
        "confinement": str(CONFINEMENT),
        "readable": [bash, *LIBRARIES, str(INSIDE / "recorder.bash"), str(path), *_scripts_beside(path)],
        "environment": {
            "HOME": "~",
            "PATH": "/nonexistent",
            "LC_ALL": "C.UTF-8",
            **variables,
            "BASH_ENV": str(INSIDE / "recorder.bash"),
        },
        "wall_s": WALL_S,
        "records_bytes": RECORDS_BYTES,
    }
    command = [sys.executable, "-I", "-S", "-B", str(INSIDE / "confined.py")]
    try:
        done = subprocess.run(
            command,
            input=json.dumps(spec),
            capture_output=True,
            text=True,
            timeout=WALL_S + GRACE_S,
            check=True,
            env={},
        )
        found: dict[str, Any] = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise UsageError(f"bash could not be run ({error})", fix=INSTEAD) from error
    if found["end"] == "cannot confine":
        raise UsageError(
            f"this machine cannot shut a script off, so it is not read ({_errors(found) or done.stderr.strip()})",
            fix=f"use a Linux with Landlock and seccomp (5.13 or newer), or {INSTEAD}",
        )
    return found


def _scripts_beside(path: Path) -> list[str]:
    """Scripts that it may read: files of its folder and of one folder below, not what links there lead to elsewhere."""
    folder = path.parent.resolve()
    found = (one for pattern in ("*.sh", "*/*.sh") for one in folder.glob(pattern))
    inside = (one for one in found if one.is_file() and one.resolve().is_relative_to(folder))
    return [str(one) for one in islice(inside, MOST_SCRIPTS)]


def _records(data: bytes) -> Iterator[tuple[str, list[str]]]:
    fields = data.decode("utf-8", "replace").split("\0")
    place = 0
    while place + 1 < len(fields) and COUNT.fullmatch(fields[place + 1]):
        kind, count = fields[place], int(fields[place + 1])
        yield kind, fields[place + 2 : place + 2 + count]
        place += 2 + count


def _errors(found: Mapping[str, Any]) -> str:
    """The last messages, without the trace of ``set -x``."""
    text = base64.b64decode(found["errors"]).decode("utf-8", "replace")
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("+")]
    return "; ".join(lines[-ERROR_LINES:])


def program_of(words: Sequence[str]) -> str:
    """The name of a command, for people."""
    return Path(words[0]).name if words else ""
