"""What to say of a process that ended without explaining itself: an ``error:`` line, an event in each run it had open.

Used by the parent of a command (:mod:`nemorl_commands.supervisor`), once the command's process is gone.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import sysconfig
import time
from dataclasses import dataclass, field
from pathlib import Path

from nemorl_base.jsonl import JsonlWriter, read_jsonl
from nemorl_base.last_words import MARK
from nemorl_base.stopping import SIGNALS

UNEXPLAINED = 70
"""Exit code in place of a 0 that the command did not mean: EX_SOFTWARE of sysexits.h."""
BY_SIGNAL = 128
"""A shell's convention: 128 + the number of the signal that ended a process."""
FRAME = re.compile(r'^  File "(.+)", line (\d+) in (.+)$', re.MULTILINE)
STACK_CHARACTERS = 4000
"""Of a stack, in an event."""


@dataclass
class LastWords:
    """What a child has noted."""

    exit: int | None = None
    """The exit code that it meant to give."""
    left: str = ""
    """Where it called ``os._exit``."""
    runs: list[Path] = field(default_factory=list)
    """Directories of runs that are open."""
    signals: dict[int, list[float]] = field(default_factory=dict)
    """When it had which signals, in epoch seconds."""
    is_on_ray: bool = False
    """It is connected to Ray."""
    fault: str = ""
    """The stacks that faulthandler wrote."""

    @classmethod
    def of(cls, descriptor: int) -> LastWords:
        words = cls()
        text = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
        fault = []
        for line in text.splitlines():
            if not line.startswith(MARK):
                fault.append(line.decode(errors="replace"))
                continue
            facts = json.loads(line.removeprefix(MARK))
            words.exit = facts.get("exit", words.exit)
            words.left = facts.get("left", words.left)
            words.is_on_ray = facts.get("ray", words.is_on_ray)
            if "run" in facts:
                words.runs.append(Path(facts["run"]))
            if "closed" in facts:
                words.runs.remove(Path(facts["closed"]))
            if "signal" in facts:
                words.signals.setdefault(facts["signal"], []).append(facts["time"])
        words.fault = "\n".join(fault).strip()
        return words

    @property
    def place(self) -> str:
        """The innermost frame of the failed thread, Python's own library aside; or where it called ``os._exit``."""
        _, _, failed = self.fault.partition("Current thread")
        # Of a time-out no thread is the current one. The main thread comes last.
        _, _, failed = (failed or self.fault.rpartition("Thread ")[2]).partition("\n")
        frames = list(FRAME.finditer(failed.partition("Thread ")[0]))
        frames = [frame for frame in frames if not _is_pythons(frame[1])] or frames
        return f"{frames[0][1]}, line {frames[0][2]} ({frames[0][3]})" if frames else self.left


def _is_pythons(file: str) -> bool:
    return file.startswith(sysconfig.get_paths()["stdlib"]) and "site-packages" not in file


def conclude(code: int, descriptor: int) -> int:
    """The exit code of the command, whose process ended with ``code``. What it could not say itself is said here."""
    words = LastWords.of(descriptor)
    came_late = -code in SIGNALS  # somebody asked it to stop once more, which it had done
    if words.exit is not None and (code in (0, words.exit) or came_late):
        return words.exit
    what = how_it_ended(code, words)
    for run in words.runs:
        _record(run, what, words.fault)
    if sys.stderr.isatty():
        sys.stderr.write("\x1b[?25h")  # a progress display may have hidden the cursor
    sys.stderr.write(f"error: {what}\n  fix: {_fix(code)}\n")
    if words.fault and "--debug" in sys.argv:
        sys.stderr.write(f"{words.fault}\n")
    sys.stderr.flush()
    return BY_SIGNAL - code if code < 0 else code or UNEXPLAINED


def how_it_ended(code: int, words: LastWords) -> str:
    """One line on an end that the process did not explain; ``code`` is negative for a signal."""
    where = f" in {words.place}" if words.place else ""
    if words.exit is not None:
        when = f"after the command had ended with exit code {words.exit}"
    else:
        when = f"in the middle of the run in {words.runs[-1]}" if words.runs else "before the command had ended"
    if code < 0:
        number = signal.Signals(-code)
        why = ", as the kernel does when memory runs out" if number is signal.SIGKILL else ""
        return f"the process was killed by signal {-code} ({number.name}){where}, {when}{why}"
    if words.left:
        return f"os._exit({code}) was called{where}, {when}"
    timed_out = words.fault.startswith("Timeout")
    why = ", as Ray does to a driver that has lost its raylet or its GCS" if words.is_on_ray and not timed_out else ""
    return f"the process {'was stuck' if timed_out else f'ended itself with exit code {code}'}{where}, {when}{why}"


def _fix(code: int) -> str:
    advice = "whose code that is must not end the process; the same command continues the run from its last checkpoint"
    if code == -signal.SIGKILL:
        advice = "see `dmesg` for out-of-memory messages, lower batch sizes; the same command continues the run"
    return f"{advice} (--debug shows the stacks there are)"


def _record(run: Path, what: str, fault: str) -> None:
    """The event that the run itself could not write."""
    try:
        steps = [record.get("step", 0) for record in read_jsonl(run / "metrics.jsonl")]
        with JsonlWriter(run / "events.jsonl") as events:
            facts = {"stack": fault[:STACK_CHARACTERS]} if fault else {}
            events.write(
                {"time": time.time(), "event": "failed", "step": max(steps, default=0), "error": what, **facts}
            )
    except OSError as error:
        sys.stderr.write(f"warning: {run} has no event of this: {error}\n")
