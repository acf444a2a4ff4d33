"""Steps that are done once: what each found is kept, and a release that was interrupted goes on behind it.

What a step found holds for what it was done with: a commit, or the files that were built.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Facts = dict[str, Any]
"""What a step found, as JSON."""


class StepFailedError(Exception):
    """A release that must not go out: what is wrong, and how to mend it."""


class Ledger:
    """What steps have found, one file each.

    Args:
        folder: Where the files are.
        identity: What the results hold for; those of another identity are done again.
    """

    def __init__(self, folder: Path, identity: str) -> None:
        self._folder = folder
        self._identity = identity
        folder.mkdir(parents=True, exist_ok=True)

    def once(self, name: str, work: Callable[[], Facts]) -> Facts:
        """The facts of a step: kept ones, or those of doing it now, with the ``seconds`` it took."""
        file = self._folder / f"{name}.json"
        kept = json.loads(file.read_text("utf-8")) if file.is_file() else {}
        if kept.get("identity") == self._identity:
            say(f"{name}: done before ({kept['facts']['seconds']} s)")
            return dict(kept["facts"])
        began = time.monotonic()
        facts = {**work(), "seconds": round(time.monotonic() - began, 1)}
        draft = file.with_suffix(".draft")
        draft.write_text(json.dumps({"identity": self._identity, "facts": facts}, indent=1) + "\n", "utf-8")
        os.replace(draft, file)
        say(f"{name}: {facts['seconds']} s{told(facts)}")
        return facts


def told(facts: Mapping[str, Any]) -> str:
    """The numbers and words among facts, for a line of progress.

    >>> told({"wheels": 22, "seconds": 3.1, "files": ["a", "b"]})
    ', wheels 22'
    """
    shown = {key: value for key, value in facts.items() if isinstance(value, int | float | str) and key != "seconds"}
    return "".join(f", {key} {value}" for key, value in shown.items())


START = time.monotonic()


def say(line: str) -> None:
    """A line of progress, with the seconds since the start."""
    print(f"[{time.monotonic() - START:7.1f} s] {line}", flush=True)


def run(*command: str | Path, limit_s: float = 1800, **options: Any) -> str:
    """What a program writes to standard output.

    Raises:
        StepFailedError: It failed; with the end of what it wrote.
    """
    words = [str(part) for part in command]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=limit_s, **options)
    if done.returncode:
        raise StepFailedError(
            f"{' '.join(words[:6])} … ended with {done.returncode}:\n{(done.stdout + done.stderr)[-3000:]}"
        )
    return str(done.stdout)


def tool(name: str) -> Path:
    """A program of this environment."""
    return Path(sys.executable).with_name(name)


def find_python(version: str) -> Path | str:
    """An interpreter of ``X.Y``, or why there is none: on the path, one of pyenv's, or one that uv has or gets."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    tried = [shutil.which(f"python{version}"), *sorted(pyenv.glob(f"versions/{version}.*/bin/python"))]
    for candidate in (place for place in tried if place is not None):
        # A shim of pyenv is there for each version, and runs for the chosen ones alone.
        done = subprocess.run([candidate, "-c", ""], capture_output=True, check=False, timeout=60)
        if done.returncode == 0:
            return Path(candidate)
    try:
        run(tool("uv"), "python", "install", version, limit_s=300)
        return Path(run(tool("uv"), "python", "find", "--managed-python", version).strip())
    except (StepFailedError, subprocess.TimeoutExpired) as error:
        return f"no python{version} on the path or in pyenv, and uv has none: {str(error).splitlines()[-1]}"
