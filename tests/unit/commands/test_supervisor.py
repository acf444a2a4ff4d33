"""A long command and its parent: signals arrive once, a lost terminal or parent ends it, a death is explained."""

from __future__ import annotations

import errno
import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from nemorl.base.process.stopping import MARK
from nemorl_cli.streams import SteadyStream
from nemorl_cli.supervisor import _conclude

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="commands are supervised on Linux only")

COMMANDS = """
import os, sys, time
from nemorl_cli import supervisor
from nemorl_cli.app import app
from nemorl.base.process.stopping import GracefulStop

@app.command("wait")
def wait(seconds: float = 0.4, says: bool = False):
    "Wait for a signal, then see whether another comes."
    names = []
    with GracefulStop(names.append):
        print("ready", os.getpid(), flush=True)
        while not names:
            time.sleep(0.01)
        if says:
            print("asked", flush=True)
        time.sleep(seconds)
    print(names, flush=True)

@app.command("echo")
def echo():
    print(sys.stdin.read(), flush=True)

@app.command("stuck")
def stuck():
    "In C, where no signal is looked at."
    from collections import deque
    from itertools import repeat
    from nemorl.base.process import deadlines
    deadlines.GRACE_S = 0.2
    with deadlines.deadline("the hook", 0.1):
        deque(repeat(0), maxlen=0)

@app.command("chat")
def chat():
    for _ in range(100_000):
        print("all work and no play")

@app.command("lagging")
def lagging():
    "Ended but for a moment, in which it is asked again."
    import atexit, signal
    atexit.register(lambda: (signal.signal(signal.SIGINT, signal.SIG_DFL), os.kill(os.getpid(), signal.SIGINT)))

@app.command("alone")
def alone():
    print("supervised" if "NEMORL_SUPERVISOR" in os.environ else "alone")

supervisor.SUPERVISED = supervisor.SUPERVISED | {"wait", "echo", "stuck", "chat", "lagging"}
supervisor.run()
"""


def start(*arguments: str, **options: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", COMMANDS, *arguments]
    given = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    return subprocess.Popen(command, text=True, start_new_session=True, **given)  # type: ignore[call-overload,no-any-return]


def child_of(process: subprocess.Popen[str]) -> int:
    """The supervised process, once it is ready."""
    assert process.stdout is not None
    word, pid = process.stdout.readline().split()
    assert word == "ready"
    return int(pid)


def is_asked(process: subprocess.Popen[str]) -> None:
    """Wait until a process that says so has had its first signal."""
    assert process.stdout is not None
    assert process.stdout.readline() == "asked\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
@pytest.mark.parametrize("target", ["parent", "child", "group"])
def test_a_signal_asks_once_whomever_it_is_sent_to(target: str, number: signal.Signals) -> None:
    if (target, number) == ("child", signal.SIGHUP):
        return  # nothing new: two processes fewer to start
    process = start("wait")
    child = child_of(process)
    if target == "group":
        os.killpg(process.pid, number)
    else:
        os.kill(process.pid if target == "parent" else child, number)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (0, f"['{number.name}']\n", "")


def test_a_parent_that_comes_late_passes_nothing_on_that_the_child_has_had() -> None:
    process = start("wait", "--says", "--seconds=1.5")
    child_of(process)
    os.kill(process.pid, signal.SIGSTOP)  # as on a machine that is busy with others
    os.killpg(process.pid, signal.SIGINT)
    is_asked(process)
    time.sleep(0.5)
    os.kill(process.pid, signal.SIGCONT)
    assert (*process.communicate(timeout=60), process.returncode) == ("['SIGINT']\n", "", 0)


@pytest.mark.parametrize("target", ["parent", "group"])
def test_two_signals_ask_twice(target: str) -> None:
    process = start("wait", "--says", "--seconds=60")
    child_of(process)
    send = os.kill if target == "parent" else os.killpg
    send(process.pid, signal.SIGINT)
    is_asked(process)
    send(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=50)
    assert (process.returncode, out) == (130, "")
    assert "ended at once" in err


def test_ctrl_c_of_a_terminal_asks_once() -> None:
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, "-c", COMMANDS, "wait"])
    read = b""
    while b"ready" not in read:
        read += os.read(terminal, 1000)
    os.write(terminal, b"\x03")
    try:
        while select.select([terminal], [], [], 60)[0]:
            read += os.read(terminal, 1000)
    except OSError:  # the other end is closed
        pass
    _, status = os.waitpid(pid, 0)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(status) == 0
    assert b"['SIGINT']" in read


def test_a_terminal_that_hangs_up_asks_once() -> None:
    reader, writer = os.pipe()
    pid, terminal = pty.fork()
    if pid == 0:
        os.dup2(writer, 1)
        os.execv(sys.executable, [sys.executable, "-c", COMMANDS, "wait"])
    os.close(writer)
    with os.fdopen(reader) as said:
        assert said.readline().startswith("ready")
        os.close(terminal)
        assert said.read() == "['SIGHUP']\n"
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0


def test_whoever_kills_the_parent_kills_the_command() -> None:
    process = start("wait")
    child = child_of(process)
    process.kill()
    process.communicate()
    stat = Path(f"/proc/{child}/stat")
    deadline = time.monotonic() + 60
    while stat.is_file() and stat.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < deadline, "the command lives on, unsupervised"
        time.sleep(0.02)


def test_a_killed_child_is_explained_by_the_parent() -> None:
    process = start("wait")
    os.kill(child_of(process), signal.SIGKILL)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 137
    assert err.startswith("error: the process was killed by signal 9 (SIGKILL), before the command had ended")


def test_a_signal_that_comes_when_the_command_has_ended_changes_nothing() -> None:
    process = start("lagging")
    _, said = process.communicate(timeout=60)
    assert (process.returncode, said) == (0, "")


def test_code_that_nothing_interrupts_is_ended_and_named() -> None:
    process = start("stuck")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert err.startswith("error: the process was stuck in <string>, line ")
    assert "(stuck), before the command had ended" in err


def test_a_command_that_trains_nothing_has_no_parent() -> None:
    process = start("alone")
    assert process.communicate(timeout=60) == ("alone\n", "")


def test_the_command_reads_what_the_parent_was_given() -> None:
    process = start("echo", stdin=subprocess.PIPE)
    assert process.communicate("a line", timeout=60) == ("a line\n", "")
    assert process.returncode == 0


def test_a_reader_that_has_enough_is_no_traceback_and_no_success() -> None:
    process = start("chat")
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == ""
    assert process.wait(60) == 128 + signal.SIGPIPE


@pytest.mark.parametrize("closed", [">&-", "<&- >&-", "<&- >&- 2>&-"])
def test_output_that_the_caller_has_closed_goes_nowhere_and_to_no_file(closed: str, tmp_path: Path) -> None:
    write = f"""
@app.command("write")
def write():
    with open({str(tmp_path / "own")!r}, "w") as own:
        os.write(1, b"native")
        print("no play", flush=True)
        own.write(str(own.fileno() > 2))

supervisor.run()"""
    script = COMMANDS.replace("supervisor.run()\n", "") + write
    (tmp_path / "commands.py").write_text(script)
    command = f'"$1" "$2" write {closed}'
    arguments = ["sh", "-c", command, "sh", sys.executable, str(tmp_path / "commands.py")]
    done = subprocess.run(arguments, capture_output=True, check=False, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    assert (tmp_path / "own").read_text() == "True"


def test_a_stream_whose_reader_is_gone_says_so_and_goes_on() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as file:
        stream = SteadyStream(file)
        stream.write("x" * 100_000)
        stream.flush()
        assert stream.is_lost
        stream.write("more")
        stream.flush()


def test_another_error_of_a_stream_is_not_hidden() -> None:
    with open("/dev/full", "w") as file:
        stream = SteadyStream(file)
        stream.write("x")
        with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
            stream.flush()
        os.dup2(os.open(os.devnull, os.O_WRONLY), file.fileno())  # so that closing it can flush


FAULT = """Fatal Python error: Segmentation fault

Thread 0x1 (most recent call first):
  File "/usr/lib/idle.py", line 3 in wait

Current thread 0x2 (most recent call first):
  File "{stdlib}/ctypes/__init__.py", line 519 in string_at
  File "/site/acme.py", line 7 in build
  File "/site/nemorl/run.py", line 9 in open

Thread 0x3 (most recent call first):
  File "/usr/lib/other.py", line 4 in wait
"""
TIMEOUT = """Timeout (0:01:00)!
Thread 0x1 (most recent call first):
  File "/usr/lib/idle.py", line 3 in wait

Thread 0x2 (most recent call first):
  File "/site/acme.py", line 8 in on_step_end
"""


@pytest.mark.parametrize(
    ("notes", "fault", "code", "exit_code", "said"),
    [
        ("", FAULT, -11, 139, "killed by signal 11 (SIGSEGV) in /site/acme.py, line 7 (build), before the command"),
        ('{"run": "/runs/a"}', "", -9, 137, "before the command had ended, as the kernel does when memory runs out"),
        ("", "", 0, 70, "ended itself with exit code 0, before the command had ended: by os._exit"),
        ("", TIMEOUT, 1, 1, "was stuck in /site/acme.py, line 8 (on_step_end)"),
        ("", "", 3, 3, "the process ended itself with exit code 3"),
        ('{"exit": 0}', "", -11, 139, "after the command had ended with exit code 0"),
        ('{"exit": 2}', "", 0, 2, ""),
        ('{"exit": 0}', "", -15, 0, ""),
    ],
)
def test_an_end_that_the_command_did_not_mean_has_an_exit_code_and_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], notes: str, fault: str, code: int, exit_code: int, said: str
) -> None:
    file = tmp_path / "said"
    stdlib = os.path.dirname(os.__file__)
    lines = b"".join(MARK + note.encode() + b"\n" for note in notes.splitlines())
    file.write_bytes(lines + fault.replace("{stdlib}", stdlib).encode())
    with file.open("rb") as opened:
        assert _conclude(code, opened.fileno()) == exit_code
    told = capsys.readouterr().err.splitlines()
    assert said in "".join(told[:1])
    assert [line.partition(":")[0] for line in told] == (["error", "  fix"] if said else [])
