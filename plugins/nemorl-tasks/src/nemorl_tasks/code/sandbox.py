"""Sandbox: runs a Python program with nothing but its own folder, within limits of time, memory, processes and output.

The isolation itself happens inside, in processes that a server of its own forks (``inside/``, ``server.py``). What it
achieves is not assumed but tried (``probe.py``), since it depends on the kernel and on what a container permits.
"""

from __future__ import annotations

import json
import os
import selectors
import socket
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from nemorl.base.files.owned_folders import mark

from nemorl_tasks.code.server import ENVIRONMENT, INSIDE, Server

if TYPE_CHECKING:
    from nemorl_tasks.code.rows import Asserts

Mode = Literal["namespaces", "landlock", "limits"]
Outcome = Literal["done", "timeout", "output", "broken"]

SYSTEM_PATHS = ("/usr", "/bin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/etc/localtime")
"""Paths that an interpreter needs besides its own folders. No ``/proc``, no ``/home``, no ``/var``."""
DRIVER = (
    "import sys, types\n"
    "sys.modules['wire'] = wire = types.ModuleType('wire')\n"
    f"exec({(INSIDE / 'wire.py').read_text()!r}, vars(wire))\n"
    f"exec({(INSIDE / 'driver.py').read_text()!r})\n"
)
"""The program's side of a judgement, as one text: no file of ours lies in the program's folder."""
PEER_IS_GONE, TAMPERED = 3, 4
JUDGE_CODES = (0, PEER_IS_GONE, TAMPERED)
"""Exit codes of ``inside/judge.py``."""
NO_WORD = "the sandbox ended without a word"
STDERR_BYTES = 4096
ATTEMPTS = 3
"""At a run whose server dies or stands still before the program was begun, which then has no part in it."""
START_S = 15.0
"""For the run to begin: a server that has not begun it by then stands still."""
GRACE_S = 5.0
"""For the run to be set up and to end, on top of the program's and the judge's time."""
MIB = 2**20
WAITING_PROCESSES = 2
"""Those that wait for the program have its user, hence count."""
OPEN_FILES = 64
"""Of one process. A pair of sockets holds up to 416 KiB of the kernel's memory, which is not the program's own."""


@dataclass(frozen=True)
class Limits:
    """Of one program."""

    wall_s: float
    memory_mib: int
    """Address space of each process."""
    processes: int
    output_kib: int
    disk_mib: int
    """Of its folder in all (namespaces), and of any one file."""


@dataclass(frozen=True)
class Result:
    """The result of a program."""

    outcome: Outcome
    """``broken``: the sandbox itself ended, or could not be set up, see ``stderr``."""
    returncode: int = -1
    stdout: str = ""
    stderr: str = ""
    """The beginning of it."""
    verdicts: tuple[Any, ...] = ()
    """The judge's words, as far as it came."""
    tampered: bool = False
    """The program spoke to its judge out of turn."""
    began: bool = True
    """Said of a broken run: its keeper had begun, so the program may be the cause."""


class Sandbox:
    """Safe to use from many threads: every run has processes of its own."""

    def __init__(
        self,
        limits: Limits,
        *,
        mode: Mode,
        python: str,
        readable: Sequence[str],
        filters_calls: bool = True,
        server: Server | None = None,
    ) -> None:
        """
        Args:
            limits: Of every program.
            mode: How it is isolated.
            python: The interpreter.
            readable: The interpreter's folders.
            filters_calls: Only the system calls of a list are answered.
            server: Where runs are started. Unset: one of its own.
        """
        self._limits, self.mode, self._python, self.filters_calls = limits, mode, python, filters_calls
        self._readable = list(dict.fromkeys([*SYSTEM_PATHS, *readable]))
        self._server = server or Server(python)
        self.is_closed = False
        """Programs that end from then on may have been ended by that."""

    def within(self, limits: Limits) -> Sandbox:
        """The same isolation with other limits."""
        return Sandbox(
            limits,
            mode=self.mode,
            python=self._python,
            readable=self._readable,
            filters_calls=self.filters_calls,
            server=self._server,
        )

    def close(self) -> None:
        """Start no more runs; the next one would start the server again. What runs ends by its own limits."""
        self.is_closed = True
        self._server.close()

    def run(self, files: Mapping[str, str], arguments: Sequence[str], stdin: str = "") -> Result:
        """Run ``python <arguments>`` in a folder that holds ``files``; nothing of it remains afterwards."""
        return self._run(files, arguments, stdin, None)

    def judge(self, program: str, tests: Asserts) -> Result:
        """Run ``program`` and, in another sandbox beside it, ``tests``, which call its functions.

        Its verdicts are ``passed``, or ``failed …`` and why, one per test.
        """
        asked = {"sources": tests.sources, "objects": tests.objects, "without": tests.without, "is_trial": False}
        return self._run({"solution.py": program}, ["-c", DRIVER], "", asked)

    def try_tests(self, sources: Sequence[str]) -> Result:
        """Run tests with decoys in the place of a program (``inside/decoys.py``).

        Its verdicts are, one per decoy and test: the test's number, ``passed``, ``failed …`` or ``refused …`` and why,
        the names that gave objects so far, and the built-in names that are the program's.
        """
        asked = {"sources": sources, "objects": (), "without": (), "is_trial": True}
        return self._run({"solution.py": ""}, ["-c", DRIVER], "", asked)

    def _run(self, files: Mapping[str, str], arguments: Sequence[str], stdin: str, tests: Any) -> Result:
        for _ in range(ATTEMPTS):
            result = self._attempt(files, arguments, stdin, tests)
            if result.outcome != "broken" or result.began:
                break
        return result

    def _attempt(self, files: Mapping[str, str], arguments: Sequence[str], stdin: str, tests: Any) -> Result:
        with (
            tempfile.TemporaryDirectory(prefix="nemorl-code-", ignore_cleanup_errors=True) as work,
            ExitStack() as stack,
        ):
            mark(work)
            ours, theirs = _pipes(stack)
            try:
                server = self._server.start(theirs)
            finally:
                for fd in theirs:
                    os.close(fd)
            spec = self._spec(work, files, arguments, tests)
            result = _Conversation(ours, self._limits, is_judged=tests is not None).hold(spec, stdin)
            if not result.began:
                self._server.replace(server)
            return result

    def _spec(self, work: str, files: Mapping[str, str], arguments: Sequence[str], tests: Any) -> bytes:
        limits = self._limits
        rlimits = {
            "RLIMIT_AS": limits.memory_mib * MIB,
            "RLIMIT_CPU": max(1, round(limits.wall_s + 0.5)),
            "RLIMIT_FSIZE": limits.disk_mib * MIB,
            "RLIMIT_NOFILE": OPEN_FILES,
            "RLIMIT_NPROC": limits.processes + WAITING_PROCESSES,
            "RLIMIT_CORE": 0,
        }
        if sys.platform != "linux":  # macOS accepts no limit of address space
            rlimits.pop("RLIMIT_AS")
        spec = {
            "mode": self.mode,
            "filters_calls": self.filters_calls,
            "work": work,
            "files": dict(files),
            "wall_s": limits.wall_s,
            "readable": self._readable,
            "disk_bytes": limits.disk_mib * MIB,
            "rlimits": rlimits,
            "environment": ENVIRONMENT,
            "command": [self._python, "-I", "-B", "-X", "utf8", *arguments],
            "tests": tests,
        }
        text = json.dumps(spec).encode()
        return len(text).to_bytes(8, "big") + text


def _pipes(stack: ExitStack) -> tuple[list[Any], list[int]]:
    """Our ends as files, which ``stack`` closes, and theirs: standard input, output, error, and the control socket."""
    stdin_read, stdin_write = os.pipe()
    stdout_read, stdout_write = os.pipe()
    stderr_read, stderr_write = os.pipe()
    control, their_control = socket.socketpair()
    ours = [
        stack.enter_context(os.fdopen(stdin_write, "wb", buffering=0)),
        stack.enter_context(os.fdopen(stdout_read, "rb", buffering=0)),
        stack.enter_context(os.fdopen(stderr_read, "rb", buffering=0)),
        stack.enter_context(control),
    ]
    return ours, [stdin_read, stdout_write, stderr_write, their_control.detach()]


class _Conversation:
    """Feeds a program and reads what it says, until it has ended or is too loud or too late; then nothing is left."""

    def __init__(self, pipes: Sequence[Any], limits: Limits, *, is_judged: bool) -> None:
        self._stdin, self._stdout, self._stderr, self._control = pipes
        self._limits, self._is_judged = limits, is_judged
        self._said: dict[Any, bytearray] = {pipe: bytearray() for pipe in pipes[1:]}

    def hold(self, spec: bytes, stdin: str) -> Result:
        outcome: Outcome = "broken"
        self._control.settimeout(START_S)
        with suppress(BrokenPipeError, ConnectionResetError, TimeoutError):
            self._control.sendall(spec)
            outcome = self._listen(stdin.encode("utf-8", "replace"))
        self._end()
        stdout, stderr, lines = (bytes(part) for part in self._said.values())
        ends: dict[str, dict[str, Any]] = {}
        for said in map(json.loads, lines.splitlines()):
            ends.setdefault(said["who"], {}).update(said)
        error = stderr[:STDERR_BYTES].decode("utf-8", "replace")
        if outcome == "broken" or "keeper" not in ends:  # the server died or stands still: not the program's fault
            return Result("broken", stderr=NO_WORD, began=False)
        if outcome != "done":
            return Result(outcome, stdout=stdout.decode("utf-8", "replace"), stderr=error)
        return self._judged(ends, stdout, error) if self._is_judged else _alone(ends, stdout, error)

    def _judged(self, ends: Mapping[str, dict[str, Any]], stdout: bytes, stderr: str) -> Result:
        """The judge's end decides; how the program ended matters where the judge says that it was gone."""
        judge, program = ends.get("judge", {}), ends.get("program", {})
        code = judge.get("returncode")
        verdicts = tuple(map(json.loads, stdout.splitlines()))
        if judge.get("timed_out") or program.get("timed_out"):
            return Result("timeout", stderr=stderr, verdicts=verdicts)
        errors = [end["error"] for end in ends.values() if "error" in end]
        if errors or code not in JUDGE_CODES or (code == PEER_IS_GONE and "returncode" not in program):
            return Result("broken", stderr="; ".join(errors) or stderr or NO_WORD)
        returncode = program["returncode"] if code == PEER_IS_GONE else 0
        return Result("done", returncode, stderr=stderr, verdicts=verdicts, tampered=code == TAMPERED)

    def _end(self) -> None:
        """Everything inside ends, if it has not; returns when it has."""
        with suppress(OSError):
            self._control.shutdown(socket.SHUT_WR)
        self._control.settimeout(GRACE_S)
        with suppress(OSError):
            while chunk := self._control.recv(65536):
                self._said[self._control] += chunk

    def _listen(self, stdin: bytes) -> Outcome:
        """The program's time begins with the keeper's first word: what a busy machine takes before is not its fault."""
        deadline, has_begun = time.monotonic() + START_S, False
        with selectors.DefaultSelector() as selector:
            for pipe in self._said:
                os.set_blocking(pipe.fileno(), False)
                selector.register(pipe, selectors.EVENT_READ)
            os.set_blocking(self._stdin.fileno(), False)
            selector.register(self._stdin, selectors.EVENT_WRITE)
            while self._control in selector.get_map():  # its end is the end of the sandbox
                if (left_s := deadline - time.monotonic()) <= 0:
                    return "timeout" if has_begun else "broken"
                for key, _ in selector.select(left_s):
                    if key.fileobj is self._stdin:
                        stdin = self._feed(selector, stdin)
                    elif not self._read(key.fileobj):
                        selector.unregister(key.fileobj)
                if self._said[self._control] and not has_begun:
                    deadline, has_begun = time.monotonic() + self._limits.wall_s + GRACE_S, True
                if self._is_too_loud():
                    return "output"
        # What is still in the pipes. In a namespace nothing lives on that could add to it.
        while any(self._read(pipe) for pipe in (self._stdout, self._stderr)):
            if self._is_too_loud():
                return "output"
        return "done"

    def _is_too_loud(self) -> bool:
        return not self._is_judged and len(self._said[self._stdout]) > self._limits.output_kib * 1024

    def _read(self, pipe: Any) -> bool:
        """Whether there was something to read."""
        try:
            chunk = os.read(pipe.fileno(), 65536)
        except (BlockingIOError, ConnectionResetError):
            return False
        if pipe is not self._stderr or len(self._said[pipe]) < STDERR_BYTES:
            self._said[pipe] += chunk
        return bool(chunk)

    def _feed(self, selector: selectors.BaseSelector, stdin: bytes) -> bytes:
        """The rest that is to be written; closes the pipe after the last of it."""
        try:
            stdin = stdin[os.write(self._stdin.fileno(), stdin) :] if stdin else b""
        except BlockingIOError:
            return stdin
        except BrokenPipeError:  # the program does not read its input
            stdin = b""
        if not stdin:
            selector.unregister(self._stdin)
            with suppress(BrokenPipeError):
                self._stdin.close()
        return stdin


def _alone(ends: Mapping[str, dict[str, Any]], stdout: bytes, stderr: str) -> Result:
    errors = [end["error"] for end in ends.values() if "error" in end]
    program = ends.get("program", {})
    if errors or "returncode" not in program:
        return Result("broken", stderr="; ".join(errors) or stderr or NO_WORD)
    outcome: Outcome = "timeout" if program["timed_out"] else "done"
    return Result(outcome, program["returncode"], stdout.decode("utf-8", "replace"), stderr)
