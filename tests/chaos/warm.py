"""Jobs in processes that are forked from one that has done such a job before, and has all imports and caches warm.

``python warm.py JOB`` does a job itself, then reads others from its standard input, one JSON object a line, and answers
each with a line: how its process ended. ``Warm`` is the other side.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import Any, Self

HUNG = "hung"


class Warm:
    """Runs jobs one after the other.

    >>> with Warm("tiny_runs:train", {"run_dir": "/tmp/a"}) as warm:  # doctest: +SKIP
    ...     warm.run("tiny_runs:train", {"run_dir": "/tmp/b"}, said=Path("/tmp/said"), deadline_s=60)
    0
    """

    def __init__(self, function: str, arguments: Mapping[str, Any], *, preload: Path | None = None) -> None:
        """
        Args:
            function: ``module:function``, called once before all others.
            arguments: Of it.
            preload: A library for the processes.
        """
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        if preload is not None:
            environment["LD_PRELOAD"] = str(preload)
        self._process = subprocess.Popen(
            [sys.executable, __file__, json.dumps({"function": function, "arguments": arguments})],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
        )  # fmt: skip

    def run(self, function: str, arguments: Mapping[str, Any], *, said: Path, deadline_s: float) -> int | str:
        """``module:function(**arguments)`` in a process of its own.

        Args:
            said: File for what it says.
            deadline_s: It is killed then.

        Returns:
            The exit status, negative for a signal; ``HUNG`` where the deadline passed.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        job = {"function": function, "arguments": arguments, "said": str(said), "deadline_s": deadline_s}
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        answer: int | str = json.loads(self._process.stdout.readline())
        return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self._process as process:
            process.terminate()


def _serve() -> None:
    for line in sys.stdin:
        job = json.loads(line)
        pid = os.fork()
        if pid == 0:
            _work(job)
        print(json.dumps(_end_of(pid, job["deadline_s"])), flush=True)


def _end_of(pid: int, deadline_s: float) -> int | str:
    end = time.monotonic() + deadline_s
    while time.monotonic() < end:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return HUNG


def _work(job: Mapping[str, Any]) -> None:
    descriptor = os.open(job["said"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    status = 70
    with suppress(BaseException):
        try:
            status = _call(job)
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)


def _call(job: Mapping[str, Any]) -> int:
    module, _, name = job["function"].partition(":")
    status: int = getattr(importlib.import_module(module), name)(**job["arguments"])
    return status


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    from remembered import remember

    remember()
    with redirect_stdout(sys.stderr):
        _call(json.loads(sys.argv[1]))
    gc.collect()
    gc.freeze()  # forks share what is there: a collection would make each write to all of it
    _serve()
