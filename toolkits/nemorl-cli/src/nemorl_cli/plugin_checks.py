"""What `nemorl plugins check` sees of a plugin: in a process of its own, of which nothing is left afterwards."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from nemorl.plugins import Diagnostic, PluginEntry
from nemorl_trust.source import read_source

if TYPE_CHECKING:
    from nemorl_trust.isolation.venvs import PluginVenv

MAX_ANSWER_BYTES = 4 << 20
"""Of the file in which the process of ``check`` says what it found."""
LOSSES = "losses"
"""The kind of a result of ``check`` that is of a loss, named as ``module:name``."""


def check_loss(path: str, timeout_s: float) -> dict[str, Any]:
    """The certificate of a loss that may belong to no plugin, in a fresh interpreter."""
    python = [sys.executable, "-m", "nemorl_testing.smoke"]
    return _answered(python, LOSSES, path, "a defect of the loss, or of its module", timeout_s)


def check_entry(entry: PluginEntry, full: bool, device: str, timeout_s: float) -> dict[str, Any]:
    """Look at one plugin in a fresh interpreter: its own where it is isolated."""
    stop: Diagnostic | None = entry.diagnostics[0] if entry.diagnostics else read_source(entry).problem
    if stop is not None:
        return {**_nothing_found(entry.kind, entry.id), "problems": [{"what": stop.message, "fix": stop.fix}]}
    python = [sys.executable] if entry.venv is None else [str(entry.venv.python), "-I"]
    command = [*python, "-m", "nemorl_testing.smoke", "--device", device, *(["--full"] if full else [])]
    fix = f"a defect of {entry.distribution}: update it, or uninstall it"
    return _answered(command, entry.kind, entry.id, fix, timeout_s, _variables(entry))


def _nothing_found(kind: str, name: str) -> dict[str, Any]:
    return {"id": name, "kind": kind, "ok": False, "passed": [], "skipped": {}, "notes": []}


def _answered(
    command: Sequence[str], kind: str, name: str, fix: str, timeout_s: float, variables: dict[str, str] | None = None
) -> dict[str, Any]:
    """What a process says of a plugin or a loss, or how it ended; ``fix`` is what to do about the latter."""
    with tempfile.TemporaryDirectory(prefix="nemorl-check-") as folder:
        answer = Path(folder) / "answer.json"
        what = _watched([*command, kind, name, str(answer)], timeout_s, variables)
        found = _read_answer(answer)
    if found is None:
        return {**_nothing_found(kind, name), "problems": [{"what": what, "fix": fix}]}
    return {**_nothing_found(kind, name), **found, "ok": not found["problems"]}


def _variables(entry: PluginEntry) -> dict[str, str] | None:
    """The environment of the process that looks at a plugin: an isolated one's, or all of this process's."""
    if entry.venv is None:
        return None
    from nemorl_trust.isolation.process import environment_for

    return environment_for(cast("PluginVenv", entry.venv), os.environ)


def _read_answer(path: Path) -> dict[str, Any] | None:
    """The answer of a process; ``None`` where it left nothing that can be used, which the plugin may have caused."""
    from pydantic import TypeAdapter, ValidationError

    lines = list[dict[str, str]]
    shapes: dict[str, Any] = {"problems": lines, "notes": list[str], "passed": list[str], "skipped": dict[str, str]}
    if not path.is_file() or path.stat().st_size > MAX_ANSWER_BYTES:
        return None
    try:
        found = TypeAdapter(dict[str, Any]).validate_json(path.read_bytes())
        usable = {name: TypeAdapter(shape).validate_python(found.get(name)) for name, shape in shapes.items()}
    except ValidationError:
        return None
    complete = all({"what", "fix"} <= problem.keys() for problem in usable["problems"])
    return {**usable, "import_s": found.get("import_s")} if complete else None


def _watched(command: Sequence[str], timeout_s: float, variables: Mapping[str, str] | None) -> str:
    """Run a command in a process group of its own, of which nothing is left; how it ended."""
    # A file and not a pipe: whoever inherits a pipe keeps its reader waiting.
    with tempfile.TemporaryFile("w+", errors="replace") as said:
        nothing = subprocess.DEVNULL
        try:
            process = subprocess.Popen(
                command, stdin=nothing, stdout=nothing, stderr=said, env=variables, start_new_session=True
            )
        except OSError as error:  # of an isolated plugin, whose interpreter was upgraded or removed
            return f"its process cannot start: {error}"
        try:
            code = process.wait(timeout_s)
            said.seek(0)
            return f"its process ended (exit {code}) without an answer{_last_line(said.read())}"
        except subprocess.TimeoutExpired:
            return f"loading and trying it took more than {timeout_s:.0f} s"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return f": {lines[-1]}" if lines else ""
