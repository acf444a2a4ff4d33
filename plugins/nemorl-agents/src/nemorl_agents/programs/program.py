"""One program from its start to its end: fed, heard within limits, and never left running."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from nemorl.errors import BackendError, UsageError

from nemorl_agents.programs.config import search_path

T = TypeVar("T")

KEEPER = Path(__file__).with_name("keeper.py")
CHUNK = 65536
DRAIN_S = 5.0
"""For the pipes to end once every process is gone."""


class Tail:
    """The last bytes of a stream.

    >>> tail = Tail(4)
    >>> tail.add(b"abcdef")
    >>> tail.text
    'cdef'
    """

    def __init__(self, limit: int) -> None:
        self._limit, self._size = limit, 0
        self._chunks: deque[bytes] = deque()

    def add(self, chunk: bytes) -> None:
        self._chunks.append(chunk)
        self._size += len(chunk)
        while self._size > self._limit:
            first = self._chunks.popleft()
            kept = first[self._size - self._limit :]
            self._size -= len(first) - len(kept)
            if kept:
                self._chunks.appendleft(kept)

    @property
    def text(self) -> str:
        return b"".join(self._chunks).decode("utf-8", "replace")


@dataclass(frozen=True)
class Exit:
    """How a program ended."""

    returncode: int | None
    """Below 0: ended by that signal. ``None``: it was ended from outside."""
    stdout: str
    """The end of it."""
    stderr: str
    """The end of it."""


class Program:
    """One run of a command. Single use."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        folder: Path,
        environment: Mapping[str, str],
        output_bytes: int,
        limits: Mapping[str, int],
        prefix: Sequence[str] = (),
    ) -> None:
        """
        Args:
            command: The program and its arguments.
            folder: Where it runs.
            environment: All of its variables.
            output_bytes: What is kept of standard output, and as much of standard error.
            limits: Of each process, as ``resource`` names them: ``{"RLIMIT_AS": 2**30}``.
            prefix: A command that confines it and then becomes the program.
        """
        self._command, self._prefix = [*command], [*prefix]
        self._folder, self._environment, self._limits = folder, dict(environment), dict(limits)
        self._stdout, self._stderr = Tail(output_bytes), Tail(output_bytes)

    async def run(self, stdin: str, timeout_s: float) -> Exit:
        """Run to the end, or until ``timeout_s`` is over; when this returns or is cancelled, nothing is left of it.

        Raises:
            UsageError: The command cannot be started.
        """
        ours, theirs = socket.socketpair()
        with ours:
            ours.setblocking(False)
            with theirs:
                keeper, cancelled = await _to_the_end(self._start(theirs))
            talk = asyncio.create_task(self._talk(keeper, ours, stdin))
            try:
                if cancelled is not None:
                    raise cancelled
                done, _ = await asyncio.wait({talk}, timeout=timeout_s)
            finally:
                _hang_up(ours)  # of which the keeper makes an end, whatever becomes of this task
                await _settle(talk)
                await _end(keeper)
        return talk.result() if done else self._exit(None)

    async def _start(self, control: socket.socket) -> asyncio.subprocess.Process:
        limits = json.dumps(self._limits)
        keeper = [sys.executable, "-I", "-S", "-B", str(KEEPER), str(control.fileno()), limits]
        return await asyncio.create_subprocess_exec(
            *keeper,
            *self._prefix,
            *self._command,
            cwd=self._folder,
            env=self._environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=(control.fileno(),),
            start_new_session=True,
        )

    async def _talk(self, keeper: asyncio.subprocess.Process, control: socket.socket, stdin: str) -> Exit:
        assert keeper.stdin is not None
        assert keeper.stdout is not None
        assert keeper.stderr is not None
        streams = [
            asyncio.create_task(_feed(keeper.stdin, stdin)),
            asyncio.create_task(_hear(keeper.stdout, self._stdout)),
            asyncio.create_task(_hear(keeper.stderr, self._stderr)),
        ]
        try:
            said = await _last_line(control)
            await asyncio.wait(streams, timeout=DRAIN_S)  # all who could hold a pipe open are gone
        finally:
            for stream in streams:
                stream.cancel()
        if said is None:
            raise await self._watcher_error(keeper)
        if said["could_not_start"]:
            raise UsageError(
                f"the agent's command {self._command!r} cannot be started: {said['could_not_start']}",
                fix="correct environment.command",
            )
        return self._exit(said["returncode"])

    async def _watcher_error(self, keeper: asyncio.subprocess.Process) -> BackendError:
        """Nobody knows how the program ended."""
        with suppress(TimeoutError):
            await asyncio.wait_for(keeper.wait(), DRAIN_S)
        code = keeper.returncode
        if code is None or code < 0:
            return BackendError(
                f"the process that watches over {self._command[0]!r} was killed",
                fix="look for what kills processes here: the kernel when memory runs out, or the agent itself",
            )
        return BackendError(
            f"the process that watches over {self._command[0]!r} failed with exit code {code}; the end of its stderr:\n"
            f"{self._stderr.text[-2000:]}",
            fix="see whether this machine has processes, memory and open files left, or lower "
            "rollouts.environment_concurrency",
        )

    def _exit(self, returncode: int | None) -> Exit:
        return Exit(returncode, self._stdout.text, self._stderr.text)


def _hang_up(control: socket.socket) -> None:
    with suppress(OSError):
        control.shutdown(socket.SHUT_WR)


async def _to_the_end(start: Coroutine[Any, Any, T]) -> tuple[T, asyncio.CancelledError | None]:
    """Its result, and the cancellation that came meanwhile.

    A start of a process that is cancelled in its middle never ends: Python 3.11 then waits for pipes to close that it
    has not connected yet.
    """
    starting = asyncio.create_task(start)
    try:
        return await asyncio.shield(starting), None
    except asyncio.CancelledError as error:
        return await starting, error


async def _end(keeper: asyncio.subprocess.Process) -> None:
    """Wait for its end. One that somebody has stopped goes on, so that it ends what it watches over."""
    for nudge in (signal.SIGCONT, signal.SIGKILL):
        try:
            await asyncio.wait_for(keeper.wait(), DRAIN_S)
        except TimeoutError:
            with suppress(ProcessLookupError):
                keeper.send_signal(nudge)
        else:
            return


async def _settle(talk: asyncio.Task[Exit]) -> None:
    """Its pipes are read until the last process has let go of them."""
    await asyncio.wait({talk}, timeout=DRAIN_S)
    if not talk.done():
        talk.cancel()
    elif not talk.cancelled():
        talk.exception()  # raised by whoever asks for the result; where nobody does, it is no news


async def _feed(stdin: asyncio.StreamWriter, text: str) -> None:
    with suppress(BrokenPipeError, ConnectionResetError):
        stdin.write(text.encode("utf-8", "replace"))
        await stdin.drain()
    stdin.close()


async def _hear(stream: asyncio.StreamReader, tail: Tail) -> None:
    while chunk := await stream.read(CHUNK):
        tail.add(chunk)


async def _last_line(control: socket.socket) -> dict[str, Any] | None:
    """The keeper's report when nothing is left; ``None`` where it says nothing."""
    loop, said = asyncio.get_running_loop(), b""
    while chunk := await loop.sock_recv(control, CHUNK):
        said += chunk
    found: dict[str, Any] | None = json.loads(said) if said.endswith(b"\n") else None
    return found


def clean_environment() -> dict[str, str]:
    """Variables of this process that programs see: where programs are, the language, the time zone. No keys."""
    kept = ("LANG", "LC_ALL", "LC_CTYPE", "TZ", "SSL_CERT_FILE", "SSL_CERT_DIR", "LD_LIBRARY_PATH")
    return {"PATH": search_path(), **{name: os.environ[name] for name in kept if name in os.environ}}
