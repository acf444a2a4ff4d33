"""The sandbox against programs that attack it. Each test is one thing that a policy may come to try."""

from __future__ import annotations

import ctypes
import io
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from nemorl.errors import PluginError
from nemorl_tasks.code.probe import GUARANTEES, best_sandbox, interpreter_folders, probe
from nemorl_tasks.code.sandbox import Limits, Result, Sandbox
from recorded_messages import Raises

LIMITS = Limits(wall_s=20.0, memory_mib=256, processes=8, output_kib=64, disk_mib=8)
Run = Callable[..., Result]


@pytest.fixture(scope="module")
def sandbox() -> Sandbox:
    try:
        return best_sandbox(LIMITS, None, allow_weaker=False)
    except PluginError as error:
        pytest.skip(f"this machine cannot isolate programs: {error.message}")


@pytest.fixture(scope="module")
def run(sandbox: Sandbox) -> Run:
    return lambda program, stdin="": sandbox.run({"solution.py": program}, ["solution.py"], stdin)


@pytest.fixture(scope="module")
def run_briefly(sandbox: Sandbox) -> Run:
    """For programs that do not end by themselves."""
    brief = sandbox.within(replace(LIMITS, wall_s=0.5))
    return lambda program, stdin="": brief.run({"solution.py": program}, ["solution.py"], stdin)


def processes_that_name(mark: str) -> list[str]:
    """Command lines on this machine that hold a text."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line = (entry / "cmdline").read_bytes().decode(errors="replace")
            except OSError:
                continue
            found += [line] if mark in line else []
    return found


def test_a_program_reads_computes_and_prints(run: Run) -> None:
    result = run("import math\nprint(math.factorial(int(input())), '½')", "10\n")
    assert (result.outcome, result.returncode, result.stdout) == ("done", 0, "3628800 ½\n")


def test_an_exception_is_a_return_code_and_a_message(run: Run) -> None:
    result = run("print('before')\n1/0")
    assert (result.outcome, result.returncode, result.stdout) == ("done", 1, "before\n")
    assert "ZeroDivisionError" in result.stderr


@pytest.mark.parametrize(
    "program",
    ["while True: pass", "import time; time.sleep(60)", "input()\ninput()\nimport time; time.sleep(60)"],
    ids=["busy", "asleep", "reading"],
)
def test_an_endless_program_is_stopped(run_briefly: Run, program: str) -> None:
    assert run_briefly(program, "a\nb\n").outcome == "timeout"


def test_a_program_cannot_ignore_its_end(run_briefly: Run) -> None:
    program = """
import signal, os, time
for number in range(1, 65):
    try: signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError): pass
os.setsid() if os.fork() == 0 else None
while True: time.sleep(1)
"""
    assert run_briefly(program).outcome == "timeout"


def test_a_fork_bomb_stays_small_and_leaves_nothing_behind(run: Run) -> None:
    mark = f"bomb-{os.getpid()}"
    program = f"""
import os, sys, time
started = 0
while True:
    try:
        if os.fork() == 0:
            os.setsid()
            os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(60)", "{mark}"])
        started += 1
    except OSError:
        break
print(started)
"""
    result = run(program)
    assert (result.outcome, result.stdout) == ("done", f"{LIMITS.processes - 1}\n")  # and the program itself
    assert processes_that_name(mark) == []


def test_children_end_with_the_program(run: Run) -> None:
    mark = f"orphan-{os.getpid()}"
    program = (
        f"import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)', '{mark}'])"
    )
    result = run(program)
    assert (result.outcome, result.returncode) == ("done", 0)
    assert processes_that_name(mark) == []


def test_a_memory_bomb_is_a_memory_error(run: Run) -> None:
    result = run("data = []\nwhile True: data.append(bytearray(1 << 24))")
    assert result.returncode != 0
    assert "MemoryError" in result.stderr


@pytest.mark.parametrize(
    "attempt",
    [
        "s = socket.socket(); s.settimeout(0.5); s.connect(('127.0.0.1', PORT))",
        "s = socket.socket(); s.settimeout(0.5); s.connect(('192.0.2.1', 80))",
        "s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.sendto(b'x', ('192.0.2.1', 53))",
        "socket.getaddrinfo('example.com', 80)",
        "s = socket.socket(socket.AF_UNIX); s.connect('SOCKET')",
    ],
    ids=["local", "remote", "datagram", "name", "unix"],
)
def test_there_is_no_network(run: Run, tmp_path: Path, attempt: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as local:
        local.bind(str(tmp_path / "s"))
        local.listen()
        attempt = attempt.replace("PORT", str(server.getsockname()[1])).replace("SOCKET", str(tmp_path / "s"))
        result = run(f"import socket\ntry:\n    {attempt}\nexcept OSError: print('refused')\nelse: print('through')")
    assert result.stdout == "refused\n"


def test_nothing_can_be_written_outside_the_folder_and_nothing_stays_in_it(run: Run, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("untouched")
    for path in (tmp_path, target):
        path.chmod(0o777)
    program = f"""
import os, sys
open('mine', 'w').write('x')
for attempt in (
    lambda: open({str(target)!r}, 'w'),
    lambda: open({str(tmp_path / "new")!r}, 'w'),
    lambda: os.remove({str(target)!r}),
    lambda: os.chmod({str(target)!r}, 0),
    lambda: open('/tmp/new', 'w'),
    lambda: open('/usr/new', 'w'),
    lambda: os.chmod(sys.executable, 0),
    lambda: os.mkdir('/new'),
    lambda: os.symlink('/etc', '/work2'),
):
    try: attempt()
    except OSError: print('refused')
    else: print('through')
"""
    result = run(program)
    assert result.stdout.splitlines() == ["refused"] * 9
    assert (target.read_text(), sorted(path.name for path in tmp_path.iterdir())) == ("untouched", ["target"])
    assert run("import os; print(os.listdir('.'))").stdout == "['solution.py']\n"


def test_files_of_the_user_cannot_be_read(run: Run, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("key")
    for path in (tmp_path, secret):
        path.chmod(0o777)
    paths = [str(secret), "/etc/passwd", "/proc/1/environ", "/proc/self/environ", str(Path(__file__)), "/home"]
    program = f"""
import os
for path in {paths!r}:
    try: os.listdir(path) if os.path.isdir(path) else open(path).read()
    except OSError: print('refused')
    else: print('through', path)
"""
    assert run(program).stdout.splitlines() == ["refused"] * len(paths)


def test_secrets_in_the_environment_are_not_passed_on(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    result = run("import os; print(*sorted(os.environ))")
    assert "HF_TOKEN" not in result.stdout
    assert set(result.stdout.split()) <= {
        "PATH",
        "LANG",
        "LC_CTYPE",
        "PYTHONIOENCODING",
        "OMP_NUM_THREADS",
        "HOME",
        "TMPDIR",
    }


def test_other_processes_are_out_of_reach(run: Run) -> None:
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        program = f"import os\ntry: os.kill({other.pid}, 9)\nexcept OSError: print('refused')\nos.kill(-1, 9)"
        result = run(program)
        assert result.stdout in ("refused\n", "")  # killing everything in its own world may include itself
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_it_cannot_become_root_again(run: Run) -> None:
    program = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
print(os.getuid() != 0, libc.unshare(0x10000000), libc.mount(b'none', b'/nemorl-program', b'tmpfs', 0, None))
for attempt in (lambda: os.setuid(0), lambda: os.chroot('/usr')):
    try: attempt()
    except OSError: print('refused')
    else: print('through')
"""
    assert run(program).stdout == "True -1 -1\nrefused\nrefused\n"


def test_huge_output_is_cut_off(run: Run) -> None:
    result = run("while True: print('x' * 1000)")
    assert result.outcome == "output"
    assert len(result.stdout) < (LIMITS.output_kib + 128) * 1024


def test_many_messages_on_stderr_fill_nothing(run: Run) -> None:
    result = run("import sys\nfor _ in range(20_000): sys.stderr.write('x' * 1000)")
    assert (result.outcome, len(result.stderr)) == ("done", 4096)


def test_the_disk_cannot_be_filled(run: Run) -> None:
    program = """
try:
    for number in range(100):
        with open(str(number), 'wb') as file: file.write(bytes(1 << 20))
except OSError as error: print(number, 'full')
"""
    count, word = run(program).stdout.split()
    assert (int(count) <= LIMITS.disk_mib, word) == (True, "full")


def test_input_that_nobody_reads_is_no_problem(run: Run) -> None:
    assert run("print('done')", "x" * 5_000_000).stdout == "done\n"
    assert run("import sys; print(len(sys.stdin.read()))", "x" * 5_000_000).stdout == "5000000\n"


@pytest.mark.parametrize("program", ["\x00", "\ud800", "(" * 10_000, "é = 1\nprint(é)", ""], ids=ascii)
def test_any_text_is_a_program_that_ends(run: Run, program: str) -> None:
    assert run(program).outcome == "done"


def test_sandboxes_run_side_by_side(run: Run) -> None:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(8) as threads:
        results = list(threads.map(lambda number: run(f"print({number} * 2)"), range(24)))
    assert [result.stdout for result in results] == [f"{number * 2}\n" for number in range(24)]


def test_descriptors_are_given_back(run: Run) -> None:
    run("pass")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        run("print(1)")
    assert len(os.listdir("/proc/self/fd")) == before


def test_links_lead_nowhere_outside(run: Run, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("key")
    for path in (tmp_path, secret):
        path.chmod(0o777)
    targets = (str(secret), "/etc/passwd", "/proc/self/environ", f"../../../..{secret}", "/proc/1/root")
    program = f"""
import os
for number, target in enumerate({targets}):
    os.symlink(target, str(number))
    for attempt in (lambda: open(str(number)).read(), lambda: open(str(number), "w"), lambda: os.listdir(str(number))):
        try: attempt()
        except OSError: pass
        else: print("through", target)
    try: os.link(target, "hard")
    except OSError: pass
    else: print("linked", target)
"""
    result = run(program)
    assert (result.returncode, result.stdout) == (0, "")
    assert secret.read_text() == "key"


def test_a_program_has_no_descriptor_but_its_own_three(run: Run) -> None:
    program = """
import os
for fd in range(64):
    try: os.fstat(fd)
    except OSError: continue
    print(fd)
"""
    assert run(program).stdout.split() == ["0", "1", "2"]


# What a machine permits


@pytest.mark.skipif(sys.platform != "linux", reason="Landlock is Linux")
def has_the_means() -> bool:
    """Asked of the system and of util-linux: were a defence broken, ours would say that the machine cannot isolate."""
    as_root = [] if os.geteuid() == 0 else ["--map-root-user"]
    apart = ["unshare", *as_root, "--mount", "--ipc", "--pid", "--fork", "--net", "--uts", "true"]
    filters = Path("/proc/sys/kernel/seccomp/actions_avail")
    landlock_version = ctypes.CDLL(None).syscall(444, None, 0, 1)  # landlock_create_ruleset, which tells it
    try:
        done = subprocess.run(apart, capture_output=True, check=False, timeout=60)
    except OSError:
        return False
    return done.returncode == 0 and filters.exists() and landlock_version > 0


def test_a_machine_that_has_the_means_isolates() -> None:
    if not has_the_means():
        pytest.skip("no namespaces, seccomp or Landlock here")
    sandbox = best_sandbox(LIMITS, None, allow_weaker=False)
    assert (sandbox.mode, sandbox.filters_calls) == ("namespaces", True)
    sandbox.close()


def test_landlock_alone_prevents_reads_and_writes() -> None:
    python, readable = interpreter_folders(os.path.realpath(sys.executable))
    holds, reason = probe(Sandbox(LIMITS, mode="landlock", python=python, readable=readable))
    if reason:
        pytest.skip(f"no Landlock here: {reason}")
    assert (holds["reads"], holds["writes"], holds["memory"]) == (True, True, True)
    assert set(holds) == set(GUARANTEES)


def test_a_machine_that_cannot_isolate_is_refused_with_what_is_missing(raises: Raises) -> None:
    with raises(PluginError, "environment.allow_weaker_sandbox", varies="(?<=Missing: ).*"):
        best_sandbox(LIMITS, None, allow_weaker=False, modes=["limits"])


def test_a_weaker_sandbox_is_used_when_allowed_and_says_what_is_missing(logged: io.StringIO) -> None:
    sandbox = best_sandbox(LIMITS, None, allow_weaker=True, modes=["limits"])
    assert sandbox.mode == "limits"
    assert "no writes outside its folder" in logged.getvalue()
    assert sandbox.run({"solution.py": "print(1)"}, ["solution.py"]).stdout == "1\n"
    brief = best_sandbox(replace(LIMITS, wall_s=0.5), None, allow_weaker=True, modes=["limits"])
    assert brief.run({"solution.py": "while True: pass"}, ["solution.py"]).outcome == "timeout"


def test_an_interpreter_that_does_not_exist_is_named(raises: Raises) -> None:
    with raises(PluginError, "/no/python"):
        best_sandbox(LIMITS, "/no/python", allow_weaker=True)
