"""One run: isolates the program, and its judge if it has one, each for itself, and ends both when the time has come.

The server forks a keeper, the keeper a gate per party. A gate gives up its rights and forks a supervisor, the first
process of the new namespace, and that one the party. The keeper is never isolated and runs no foreign code. When the
other end of ``control`` is closed it ends everything, so nothing outlives the one who asked.
"""

from __future__ import annotations

import os
import resource
import select
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import judge
from supervisor import report, supervise

if sys.platform == "linux":
    import landlock
    import libc
    import namespaces
    import seccomp

JUDGE_MEMORY_BYTES = 1 << 30
JUDGE_EXTRA_S = 2.0
"""On top of the program's time: when that is over, the judge is told and finishes."""


@dataclass(frozen=True)
class _Party:
    who: str
    wall_s: float
    files: dict[str, str]
    own: tuple[int, ...]
    """Its descriptors, besides the first three."""
    run: Callable[[str], None]
    """Gets the folder that it works in; does not return."""


class _Running:
    """A gate and what it started."""

    def __init__(self, party: _Party, spec: dict[str, Any], control: int, foreign: tuple[int, ...]) -> None:
        self.life, held = os.pipe()  # its other end is open as long as the gate or the supervisor lives
        self.gate = os.fork()
        if self.gate == 0:
            for fd in (self.life, *foreign):
                os.close(fd)
            _gate(party, spec, control)
        os.close(held)

    def wait(self, control: int) -> None:
        """Until it is over, or nobody wants to know any more."""
        select.select([self.life, control], [], [])

    def end(self) -> int:
        """Kill what is left of it, wait until that is gone, and tell the exit code."""
        os.kill(self.gate, signal.SIGKILL)  # and with it the supervisor, and with that its namespace
        _, status = os.waitpid(self.gate, 0)
        os.read(self.life, 1)
        return os.waitstatus_to_exitcode(status)


def keep(control: int, spec: dict[str, Any]) -> None:
    """Returns when everything that it started is gone."""
    if sys.platform == "linux":
        libc.prctl(libc.PR_SET_CHILD_SUBREAPER, 1)  # what a program leaves behind becomes a child of this process
    _hold(control, spec)
    if sys.platform == "linux" and spec["mode"] != "namespaces":
        _end_orphans()


def _hold(control: int, spec: dict[str, Any]) -> None:
    tests, wall_s = spec.pop("tests"), spec["wall_s"]
    if tests is None:
        program = _Party("program", wall_s, spec["files"], (), lambda work: _execute(spec, work, []))
        running = _Running(program, spec, control, ())
        running.wait(control)
        running.end()
        return
    asked, asks = os.pipe()
    heard, answers = os.pipe()
    judging = _Party("judge", wall_s + JUDGE_EXTRA_S, {}, (asks, heard), lambda _: _judge(spec, tests, asks, heard))
    judged = _Party(
        "program", wall_s, spec["files"], (asked, answers), lambda work: _execute(spec, work, [asked, answers])
    )
    judge_runs = _Running(judging, spec, control, (asked, answers))
    program_runs = _Running(judged, spec, control, (asks, heard, judge_runs.life))
    for fd in (asked, asks, heard, answers):
        os.close(fd)
    judge_runs.wait(control)
    if judge_runs.end() == judge.PEER_IS_GONE:
        program_runs.wait(control)  # for how it ended
    program_runs.end()


def _end_orphans() -> None:
    """Where no namespace ends with its first process. Their children become ours in turn, until there are none."""
    path = f"/proc/self/task/{os.getpid()}/children"  # some kernels do not have it
    while children := os.path.exists(path) and _numbers(path):
        for pid in children:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _numbers(path: str) -> list[int]:
    with open(path) as file:
        return [int(number) for number in file.read().split()]


def _gate(party: _Party, spec: dict[str, Any], control: int) -> None:
    """Does not return."""
    try:
        work = _isolate(spec, is_program=party.who == "program")
        for name, text in party.files.items():
            with open(os.path.join(work, name), "w", encoding="utf-8", errors="surrogatepass") as file:
                file.write(text)
    except Exception as error:
        report(control, who=party.who, error=f"{type(error).__name__}: {error}")
        os._exit(1)
    if sys.platform == "linux":  # after the change of user, which forgets it
        libc.prctl(libc.PR_SET_PDEATHSIG, signal.SIGKILL)
    supervisor = os.fork()
    if supervisor == 0:
        os._exit(supervise(party.who, party.wall_s, control, party.own, lambda: _enter(party, spec, control, work)))
    for fd in (0, 1, 2, *party.own):
        os.close(fd)
    _, status = os.waitpid(supervisor, 0)
    os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


def _isolate(spec: dict[str, Any], *, is_program: bool) -> str:
    """Give up rights; the folder to work in."""
    readable, work = spec["readable"], spec["work"]
    if spec["mode"] == "namespaces":
        namespaces.enter(work, readable, spec["disk_bytes"])
        readable, work = ["/"], namespaces.WORK
    os.chdir(work if is_program else "/")
    if sys.platform == "linux":
        libc.prctl(libc.PR_SET_NO_NEW_PRIVS, 1)
    if spec["mode"] != "limits":
        writable = [work, "/dev/null"] if is_program else ["/dev/null"]
        landlock.restrict([*readable, "/dev/urandom", "/dev/zero"], writable)
    return str(work)


def _enter(party: _Party, spec: dict[str, Any], control: int, work: str) -> None:
    """The last steps of a party's own process: limits, powers, system calls. Does not return."""
    try:
        limits = spec["rlimits"]
        if party.who == "judge":  # its time is up by the clock, never by the processor
            limits |= {"RLIMIT_AS": JUDGE_MEMORY_BYTES, "RLIMIT_CPU": limits["RLIMIT_CPU"] + int(JUDGE_EXTRA_S) + 1}
        for name, value in limits.items():
            resource.setrlimit(getattr(resource, name), (value, value))
        if sys.platform == "linux":
            libc.drop_capabilities()
            if spec["filters_calls"]:
                seccomp.restrict(may_signal=spec["mode"] == "namespaces")
        party.run(work)
    except Exception as error:
        report(control, who=party.who, error=f"{type(error).__name__}: {error}")
    os._exit(127)


def _execute(spec: dict[str, Any], work: str, channel: list[int]) -> None:
    if channel:  # nobody feeds or hears a program that is judged
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 0)
        os.dup2(null, 1)
    for fd in channel:
        os.set_inheritable(fd, True)
    command = [*spec["command"], *map(str, channel)]
    os.execve(command[0], command, {**spec["environment"], "HOME": work, "TMPDIR": work})


def _judge(spec: dict[str, Any], tests: list[dict[str, Any]], asks: int, heard: int) -> None:
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    os._exit(judge.main(tests, asks, heard))
