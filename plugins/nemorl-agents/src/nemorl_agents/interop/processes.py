"""WorkerProcess: a script of ours under another interpreter, asked by lines of JSON."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from nemorl.errors import BackendError, UsageError
from nemorl.media import Media
from nemorl_media.decoding import data_url

LOG_LINES = 12
"""Of what a lost process wrote, shown in the error."""
ENDING_S = 10.0
"""For a process to end by itself once it is told to."""


class WorkerProcess:
    """One process and its answers. Safe to use from several threads and event loops."""

    def __init__(self, command: Sequence[str], what: str, *, variables: Mapping[str, str]) -> None:
        """
        Args:
            command: Reads questions from standard input and writes answers to standard output.
            what: Names it in errors.
            variables: Added to this process's own.

        Raises:
            UsageError: It cannot be started.
        """
        self._what = what
        self._numbers = itertools.count(1)
        self._writing = threading.Lock()
        """Held while a question is written, which may wait for the process to read"""
        self._lock = threading.Lock()
        """Never held meanwhile: the process may wait for its answers to be heard before it reads on"""
        self._waiting: dict[int, Future[Any]] = {}
        self._is_over = False
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                env={**os.environ, **variables}, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise UsageError(f"{what} cannot be started: {error}", fix=f"correct the path {command[0]!r}") from error
        self._tail: deque[str] = deque(maxlen=LOG_LINES)
        self._log = reading(self._process.stderr, self._tail.append)
        threading.Thread(target=self._listen, daemon=True).start()

    async def ask(self, verb: str, **given: Any) -> Any:
        """The answer to one question. Cancelling this cancels what the process does for it.

        Raises:
            UsageError: The process says what is to be mended.
            BackendError: The process failed at it, or has ended.
        """
        number, answer = self._send(verb, given)
        try:
            return await asyncio.shield(asyncio.wrap_future(answer))
        except asyncio.CancelledError:
            self._write({"number": number, "verb": "cancel"})
            with self._lock:
                self._waiting.pop(number, None)
            raise

    def ask_now(self, verb: str, *, within_s: float, **given: Any) -> Any:
        """The same, blocking."""
        _, answer = self._send(verb, given)
        try:
            return answer.result(within_s)
        except TimeoutError as error:
            raise BackendError(
                f"{self._what} took more than {within_s:.0f} s to {verb}", fix="look for what it waits for"
            ) from error

    def close(self) -> None:
        """End it, and what it started in its own session. Twice is harmless."""
        with self._writing, suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(ENDING_S)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _send(self, verb: str, given: Mapping[str, Any]) -> tuple[int, Future[Any]]:
        number, answer = next(self._numbers), Future[Any]()
        with self._lock:
            if self._is_over:
                raise self._lost()
            self._waiting[number] = answer
        self._write({"number": number, "verb": verb, **given})
        return number, answer

    def _write(self, question: Mapping[str, Any]) -> None:
        line = json.dumps(question, default=_as_text).encode() + b"\n"
        with self._writing, suppress(OSError, ValueError):  # it has ended, of which the listener tells all who wait
            assert self._process.stdin is not None
            self._process.stdin.write(line)
            self._process.stdin.flush()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as answers:
            for line in answers:
                said = json.loads(line)
                with self._lock:
                    waiting = self._waiting.pop(said["number"], None)
                if waiting is None:  # whoever asked has stopped waiting
                    continue
                if "result" in said:
                    waiting.set_result(said["result"])
                else:
                    waiting.set_exception(self._failure(said))
        self._process.wait()
        self._log.join(1.0)
        with self._lock:
            self._is_over = True
            lost, self._waiting = self._waiting, {}
        for waiting in lost.values():
            waiting.set_exception(self._lost())

    def _failure(self, said: Mapping[str, str]) -> Exception:
        if "told" in said:
            return UsageError(f"{self._what}: {said['told']}", fix="correct the environment's options")
        return BackendError(f"{self._what}: {said['error']}", fix="the error is its own; see what it wrote in the log")

    def _lost(self) -> BackendError:
        tail = "".join(f"\n    | {line}" for line in self._tail)
        code = self._process.returncode
        return BackendError(
            f"{self._what} has ended (exit code {code}){'; it wrote:' + tail if tail else ''}",
            fix="mend what it says, or try it by hand",
        )


def _as_text(value: object) -> str:
    return data_url(value) if isinstance(value, Media) else str(value)


def reading(stream: IO[bytes] | None, keep: Callable[[str], None]) -> threading.Thread:
    """A thread that hears a stream to its end, line by line."""
    assert stream is not None

    def read() -> None:
        with stream:
            for line in stream:
                keep(line.decode(errors="replace").rstrip())

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    return thread


def script(name: str) -> str:
    """The path of a script that runs under another interpreter."""
    return str(Path(__file__).with_name("workers") / name)
