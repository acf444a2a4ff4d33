"""``nemorl`` commands in processes of their own, forked from one that has imported what is heavy and nothing else."""

from __future__ import annotations

import atexit
import io
import multiprocessing
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

HEAVY = ["torch", "transformers.models.qwen2.modeling_qwen2", "nemorl_dtensor.training", "nemorl_dtensor.generation"]
"""Imported once for all commands."""


class Launched:
    """One command, as its user would have typed it. ``process`` is the parent that supervises it."""

    def __init__(self, arguments: Sequence[str], folder: Path) -> None:
        forks = multiprocessing.get_context("forkserver")
        forks.set_forkserver_preload(HEAVY)
        folder.mkdir(parents=True)
        self._out, self._err = folder / "stdout", folder / "stderr"
        self._process = forks.Process(target=_run, args=(list(arguments), str(self._out), str(self._err)))
        self._process.start()
        atexit.register(self._process.kill)  # of a test that failed: who exits waits for its processes

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def send_signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def poll(self) -> int | None:
        """The exit code, if it has ended."""
        return self._process.exitcode

    def wait(self, timeout_s: float = 300.0) -> tuple[int, str, str]:
        """Exit code, stdout and stderr."""
        self._process.join(timeout_s)
        assert self._process.exitcode is not None, f"still running after {timeout_s:g} s: {self._err.read_text()}"
        return self._process.exitcode, self._out.read_text(), self._err.read_text()


def _run(arguments: list[str], out: str, err: str) -> None:
    for descriptor, path in ((0, os.devnull), (1, out), (2, err)):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), descriptor)
    sys.stdout = io.TextIOWrapper(io.FileIO(1, "w"), write_through=True)
    sys.stderr = io.TextIOWrapper(io.FileIO(2, "w"), write_through=True)
    sys.argv = ["nemorl", *arguments]
    from nemorl_cli.supervisor import run

    try:
        run()
    except SystemExit as end:
        os._exit(end.code if isinstance(end.code, int) else 98)
    os._exit(99)
