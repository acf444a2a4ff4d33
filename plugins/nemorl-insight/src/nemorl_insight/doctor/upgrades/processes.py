"""Commands with a time limit, of which nothing is left running."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

KEPT_CHARACTERS = 20_000
"""Of what a command says on standard error: the end, where the error is."""


@dataclass(frozen=True)
class Done:
    """A command that has ended, or was ended."""

    code: int | None
    """``None``: it took longer than it may."""
    out: str
    err: str
    seconds: float

    @property
    def error(self) -> str:
        """How it failed, in a line: the last one that it wrote."""
        if self.code is None:
            return f"took more than {self.seconds:.0f} s"
        lines = [line.strip() for line in (self.err.strip() or self.out.strip()).splitlines()]
        stated = [line for line in lines if line.startswith(("error:", "ERROR:"))]
        return (stated or lines or [f"exit {self.code}, and nothing said"])[-1]


def run_limited(command: Sequence[str], timeout_s: float, variables: Mapping[str, str] | None = None) -> Done:
    """Run a command in a process group of its own, which ends with it, at its time limit, or with this process's
    interruption.

    Args:
        command: Program and arguments.
        timeout_s: Seconds that it may take.
        variables: The environment. Unset: this process's.
    """
    began = time.monotonic()
    # Files and not pipes: whoever inherits a pipe keeps its reader waiting.
    with (
        tempfile.TemporaryFile("w+", errors="replace") as out,
        tempfile.TemporaryFile("w+", errors="replace") as err,
    ):
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=variables, start_new_session=True
        )
        code: int | None = None
        try:
            with suppress(subprocess.TimeoutExpired):
                code = process.wait(timeout_s)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        seconds = time.monotonic() - began
        out.seek(0)
        err.seek(0)
        return Done(code, out.read(), err.read()[-KEPT_CHARACTERS:], seconds)
