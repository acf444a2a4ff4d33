"""The driver's end of an isolated plugin's process: start it, call it, say what happened when it dies."""

from __future__ import annotations

import itertools
import os
import socket
import subprocess
import tempfile
import threading
from concurrent.futures import Future, InvalidStateError
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from functools import cache
from multiprocessing.connection import Connection
from typing import Any

from nemorl import __version__
from nemorl.errors import PluginError
from nemorl.plugins.venvs import PluginVenv

START_S = 120.0
"""Longest time until the process answers for the first time: it imports nemorl from a cold disk."""
CALL_S = 600.0
"""Longest time of a call whose caller has no deadline of its own, such as building an environment."""
LOG_LINES = 8
"""Lines of a lost process's output shown in the error."""


class IsolatedProcess:
    """One process per environment and driver, started at the first call, and again after it died."""

    def __init__(self, venv: PluginVenv) -> None:
        self._venv = venv
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._waiting: dict[int, Future[Any]] = {}
        self._connection: Connection | None = None

    def call(self, verb: str, *args: Any) -> Any:
        """One call, and its answer.

        Raises:
            PluginError: the plugin's code raised, its process died or cannot start.
        """
        try:
            return self.send(verb, *args).result(CALL_S)
        except FutureTimeoutError as error:
            raise PluginError(
                f"{self._who} took more than {CALL_S:.0f} s to {verb}", fix="look for what it waits for"
            ) from error

    def send(self, verb: str, *args: Any) -> Future[Any]:
        """One call; the answer comes later."""
        with self._lock:
            connection = self._connection or self._start()
            number = next(self._numbers)
            answer = self._waiting[number] = Future()
            try:
                connection.send((number, verb, args))
            except (OSError, ValueError) as error:
                del self._waiting[number]
                raise PluginError(f"{self._who} ended: {error}", fix=self._fix) from error
            except Exception as error:  # whatever an object says that cannot be pickled
                del self._waiting[number]
                raise PluginError(
                    f"{self._who} takes plain data only: {error}", fix="give options as text, numbers, lists, mappings"
                ) from error
        return answer

    def tell(self, verb: str, *args: Any) -> None:
        """A call whose answer nobody needs; nothing happens where the process is gone."""
        if self._connection is not None:
            with suppress(PluginError):
                self.send(verb, *args)

    @property
    def _who(self) -> str:
        return f"the process of isolated plugin {self._venv.distribution}"

    @property
    def _fix(self) -> str:
        return f"nemorl plugins check {self._venv.distribution}, or install it again"

    def _start(self) -> Connection:
        """Start the process and the thread that reads its answers. The caller holds the lock."""
        ours, theirs = socket.socketpair()
        output = tempfile.TemporaryFile()  # noqa: SIM115  (lives as long as the process)
        command = [str(self._venv.python), "-I", "-m", "nemorl.plugins.isolated_server", str(theirs.fileno())]
        try:
            process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
            )
        except OSError as error:
            raise PluginError(f"{self._who} cannot start: {error}", fix=self._fix) from error
        finally:
            theirs.close()
        connection = Connection(ours.detach())
        version = self._greeting(connection, process, output)
        if version != __version__:
            connection.close()
            raise PluginError(
                f"{self._venv.folder} has nemorl-core {version}, this process {__version__}",
                fix=f"nemorl plugins install {self._venv.distribution} --isolated",
            )
        self._connection = connection
        threading.Thread(target=self._read, args=(connection, process, output), daemon=True).start()
        return connection

    def _greeting(self, connection: Connection, process: subprocess.Popen[bytes], output: Any) -> Any:
        try:
            if connection.poll(START_S):
                return connection.recv()[2]
            process.kill()
            what = f"did not answer in {START_S:.0f} s"
        except (EOFError, OSError):
            what = f"ended at once (exit {process.wait()})"
        raise PluginError(f"{self._who} {what}{_last_words(output)}", fix=self._fix)

    def _read(self, connection: Connection, process: subprocess.Popen[bytes], output: Any) -> None:
        while True:
            try:
                number, ok, result = connection.recv()
            except (EOFError, OSError):
                break
            self._settle(number, result if ok else PluginError(f"{self._venv.distribution}: {result}"))
        with self._lock:
            self._connection = None
            lost, self._waiting = self._waiting, {}
        said = f"{self._who} died (exit {process.wait()}){_last_words(output)}"
        for answer in lost.values():
            _set(answer, PluginError(said, fix=self._fix))

    def _settle(self, number: int, result: Any) -> None:
        with self._lock:
            answer = self._waiting.pop(number, None)
        if answer is not None:
            _set(answer, result)


def _set(answer: Future[Any], result: Any) -> None:
    with suppress(InvalidStateError):  # whoever asked has stopped waiting
        if isinstance(result, Exception):
            answer.set_exception(result)
        else:
            answer.set_result(result)


def _last_words(output: Any) -> str:
    output.seek(0, os.SEEK_SET)
    lines = output.read().decode(errors="replace").splitlines()[-LOG_LINES:]
    return "; its last output:\n" + "\n".join(f"    | {line}" for line in lines) if lines else ""


@cache
def process_of(venv: PluginVenv) -> IsolatedProcess:
    """The process of an environment: one for this driver, however many parts use it."""
    return IsolatedProcess(venv)
