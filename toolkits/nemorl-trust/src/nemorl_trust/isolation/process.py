"""The driver's end of an isolated plugin's process: start it, call it, say what happened when it dies."""

from __future__ import annotations

import itertools
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future, InvalidStateError
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from functools import cache
from typing import IO, Any

from nemorl import __version__
from nemorl.errors import PluginError

from nemorl_trust.isolation import CONFINEMENT
from nemorl_trust.isolation.venvs import PluginVenv
from nemorl_trust.isolation.wire import CALL, RESULT, WireError, error_of, packed, receive, result_of, send

START_S = 120.0
"""Longest time until the process answers for the first time: it imports nemorl from a cold disk."""
CALL_S = 600.0
"""Longest time of a call whose caller has no deadline of its own, such as building an environment."""
SEND_S = 60.0
"""Longest time that the process may take to read a message."""
LOG_LINES = 8
"""Lines of a lost process's output shown in the error."""
LOG_BYTES = 8192
"""Of its output that are kept; there may be any amount."""
PASSED_ON = re.compile(
    r"PATH|HOME|USER|LOGNAME|TZ|TMPDIR|TERM|LANG|LANGUAGE|LC_[A-Z]+"
    r"|(LD|DYLD)_LIBRARY_PATH|[A-Z]+_NUM_THREADS|CUDA_(HOME|VISIBLE_DEVICES)"
    r"|SSL_CERT_(FILE|DIR)|REQUESTS_CA_BUNDLE|NEMORL_HOME|XDG_(CACHE|CONFIG|DATA)_HOME|XDG_CONFIG_DIRS"
    r"|HF_(HOME|HUB_CACHE|DATASETS_CACHE|HUB_OFFLINE|DATASETS_OFFLINE|ENDPOINT)|TRANSFORMERS_OFFLINE"
)
"""Environment variables that the process gets, besides those of its record. No secrets are among them."""


class IsolatedProcess:
    """One process per environment and driver, started at the first call, and again after it died."""

    def __init__(self, venv: PluginVenv) -> None:
        self._venv = venv
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._waiting: dict[int, tuple[str, Future[Any]]] = {}
        self._child: _Child | None = None
        self._forgotten: deque[int] = deque()

    def call(self, verb: str, *args: Any, within_s: float | None = None) -> Any:
        """One call, and its answer, by default within ``CALL_S``.

        Raises:
            PluginError: the plugin's code raised, its process died, cannot start, or answered something else.
        """
        limit = CALL_S if within_s is None else within_s
        try:
            return self.send(verb, *args).result(limit)
        except FutureTimeoutError as error:
            raise PluginError(
                f"{self._who} took more than {limit:.0f} s to {verb}", fix="look for what it waits for"
            ) from error

    def send(self, verb: str, *args: Any) -> Future[Any]:
        """One call; the answer comes later."""
        try:
            body = packed([verb, *args])
        except WireError as error:
            raise PluginError(
                f"{self._who} {error}", fix="give options and rows as text, numbers, lists, mappings"
            ) from error
        with self._lock:
            child = self._child or self._start()
            number = next(self._numbers)
            answer: Future[Any] = Future()
            self._waiting[number] = verb, answer
            until = time.monotonic() + SEND_S
            try:
                while self._forgotten:
                    forget = packed(["forget", self._forgotten.popleft()])
                    send(child.connection, next(self._numbers), CALL, forget, until=until)
                send(child.connection, number, CALL, body, until=until)
            except OSError as error:  # also when it has not read all of it in SEND_S
                del self._waiting[number]
                child.kill()  # half a message may be in the socket
                raise PluginError(f"{self._who} takes no more messages: {error}", fix=self._fix) from error
        return answer

    def forget(self, number: int) -> None:
        """Something that it built is not needed any more: it is told so before the next call.

        Safe in a finalizer, which runs anywhere, also in the middle of ``send``.
        """
        self._forgotten.append(number)

    @property
    def _who(self) -> str:
        return f"the process of isolated plugin {self._venv.distribution}"

    @property
    def _fix(self) -> str:
        return f"nemorl plugins check {self._venv.distribution}, or install it again"

    def _start(self) -> _Child:
        """Start the process and the threads that listen to it. The caller holds the lock."""
        try:
            child = _Child(self._venv)
        except OSError as error:
            raise PluginError(f"{self._who} cannot start: {error}", fix=self._fix) from error
        version = self._greeting(child)
        if version != __version__:
            child.end()
            raise PluginError(
                f"{self._venv.folder} has nemorl-core {version!r:.40}, this process {__version__}",
                fix=f"nemorl plugins install {self._venv.distribution} --isolated",
            )
        self._child = child
        threading.Thread(target=self._listen, args=(child,), daemon=True).start()
        return child

    def _greeting(self, child: _Child) -> str:
        try:
            _, _, body = receive(child.connection, until=time.monotonic() + START_S)
            version: str = result_of("", body)
            return version
        except TimeoutError:
            what = f"did not answer in {START_S:.0f} s"
        except WireError as error:
            what = str(error)
        except (EOFError, OSError):
            what = f"ended at once (exit {child.end(kill=False)})"
        child.end()
        raise PluginError(f"{self._who} {what}{child.log_tail()}", fix=self._fix)

    def _listen(self, child: _Child) -> None:
        broken = ""
        try:
            while True:
                self._settle(*receive(child.connection))
        except WireError as error:  # nothing after this can be understood
            broken = f" {error}; it"
        except (EOFError, OSError):
            pass
        status = child.end(kill=bool(broken))
        with self._lock:
            self._child = None
            lost, self._waiting = self._waiting, {}
        said = f"{self._who}{broken} died (exit {status}){child.log_tail()}"
        for _, answer in lost.values():
            _set(answer, PluginError(said, fix=self._fix))

    def _settle(self, number: int, kind: int, body: bytes) -> None:
        with self._lock:
            verb, answer = self._waiting.pop(number, ("", None))
        if answer is None:  # whoever asked has stopped waiting
            return
        try:
            _set(answer, result_of(verb, body) if kind == RESULT else self._raised(error_of(body)))
        except WireError as error:
            _set(answer, PluginError(f"{self._who} {error}", fix=self._fix))

    def _raised(self, text: str) -> PluginError:
        return PluginError(f"{self._venv.distribution}: {text}")


class _Child:
    """A running process, its socket, and the end of what it prints."""

    def __init__(self, venv: PluginVenv) -> None:
        self.connection, theirs = socket.socketpair()
        program = [str(venv.python), "-I", "-m", "nemorl_trust.isolation.server", str(theirs.fileno())]
        command = [sys.executable, "-I", "-S", "-B", str(CONFINEMENT / "apart.py"), *program]
        try:
            with theirs:
                self.process = subprocess.Popen(
                    command, pass_fds=[theirs.fileno()], env=environment_for(venv, os.environ),
                    stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                    start_new_session=True,  # no terminal, whose Ctrl-C is the driver's
                )  # fmt: skip
        except OSError:
            self.connection.close()
            raise
        self._tail = b""
        self._reader = threading.Thread(target=self._read_output, args=(self.process.stdout,), daemon=True)
        self._reader.start()
        self._waiter = threading.Thread(target=self._wait, daemon=True)
        self._waiter.start()

    def end(self, *, kill: bool = True) -> int:
        """Its exit status, after it has been made to end."""
        if kill:
            self.kill()
        status = self.process.wait()
        self._waiter.join()
        self.connection.close()
        return status

    def kill(self) -> None:
        """End it, and what it started and left in its group."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def log_tail(self) -> str:
        self._reader.join(1.0)  # a process that it started may hold the pipe open
        lines = self._tail.decode(errors="replace").splitlines()[-LOG_LINES:]
        return "; its last output:\n" + "\n".join(f"    | {line}" for line in lines) if lines else ""

    def _read_output(self, output: IO[bytes]) -> None:
        with output:
            while part := os.read(output.fileno(), LOG_BYTES):
                self._tail = (self._tail + part)[-LOG_BYTES:]

    def _wait(self) -> None:
        """See its end also where a process that it started holds the socket open; end that one, too."""
        self.process.wait()
        self.kill()
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)


def environment_for(venv: PluginVenv, environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that the process of a plugin gets."""
    granted = venv.variables
    return {name: text for name, text in environment.items() if PASSED_ON.fullmatch(name) or name in granted}


def _set(answer: Future[Any], result: Any) -> None:
    with suppress(InvalidStateError):  # whoever asked has stopped waiting
        if isinstance(result, Exception):
            answer.set_exception(result)
        else:
            answer.set_result(result)


@cache
def process_of(venv: PluginVenv) -> IsolatedProcess:
    """The process of an environment: one for this driver, however many parts use it."""
    return IsolatedProcess(venv)
