"""Attacks on the kernel's interface: calls that no program needs, and memory that no limit counts."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import nemorl_tasks.code
import pytest
from nemorl.errors import PluginError
from nemorl_tasks.code.probe import best_sandbox, interpreter_folders
from nemorl_tasks.code.sandbox import Limits, Result, Sandbox
from nemorl_trust.isolation import CONFINEMENT
from recorded_messages import Raises

LIMITS = Limits(wall_s=20.0, memory_mib=128, processes=8, output_kib=64, disk_mib=8)
Run = Callable[..., Result]
INSIDE = Path(nemorl_tasks.code.__file__).parent / "inside"


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    try:
        sandbox = best_sandbox(LIMITS, None, allow_weaker=False)
    except PluginError as error:
        pytest.skip(f"this machine cannot isolate programs: {error.message}")
    yield lambda program, stdin="": sandbox.run({"solution.py": program}, ["solution.py"], stdin)
    sandbox.close()


@pytest.fixture(scope="module")
def run_filtered() -> Iterator[Run]:
    """With the list of system calls and nothing else, as on a machine that permits no namespaces and no Landlock."""
    python, readable = interpreter_folders(os.path.realpath(sys.executable))
    sandbox = Sandbox(LIMITS, mode="limits", python=python, readable=readable)
    if sandbox.run({"solution.py": "print(1)"}, ["solution.py"]).stdout != "1\n":
        pytest.skip("this machine has no seccomp")
    yield lambda program, stdin="": sandbox.run({"solution.py": program}, ["solution.py"], stdin)
    sandbox.close()


LIBC = """
import ctypes, errno, os, sys
libc = ctypes.CDLL(None, use_errno=True)
def call(x86_64, aarch64, *arguments):
    number = x86_64 if os.uname().machine == "x86_64" else aarch64
    arguments = [ctypes.c_long(argument) for argument in arguments]
    result = libc.syscall(ctypes.c_long(number), *arguments)
    return "through" if result >= 0 else errno.errorcode[ctypes.get_errno()]
"""
CALLS = {
    "io_uring_setup": "425, 425, 8, -1",
    "bpf": "321, 280, 0, -1, 0",
    "perf_event_open": "298, 241, -1, 0, -1, -1, 0",
    "add_key": "248, 217, -1, -1, 0, 0, -3",
    "request_key": "249, 218, -1, -1, 0, -3",
    "keyctl": "250, 219, 0, -3, 1",
    "userfaultfd": "323, 282, 1",
    "ptrace": "101, 117, 0, 0, 0, 0",
    "process_vm_readv": "310, 270, 1, 0, 0, 0, 0, 0",
    "process_madvise": "440, 440, -1, 0, 0, 0, 0",
    "pidfd_getfd": "438, 438, 3, 0, 0",
    "pidfd_send_signal": "424, 424, 3, 9, 0, 0",
    "rt_sigqueueinfo": "129, 138, 1, 9, 0",
    "kcmp": "312, 272, 1, 1, 0, 0, 0",
    "unshare": "272, 97, 0x10000000",
    "setns": "308, 268, 3, 0",
    "clone3": "435, 435, 0, 0",
    "chroot": "161, 51, 0",
    "pivot_root": "155, 41, 0, 0",
    "mount": "165, 40, 0, 0, 0, 0, 0",
    "umount2": "166, 39, 0, 2",
    "open_tree": "428, 428, -100, 0, 1",
    "fsopen": "430, 430, 0, 0",
    "open_by_handle_at": "304, 265, -100, 0, 0",
    "shmget": "29, 194, 0, 4096, 0o1600",
    "shmat": "30, 196, 0, 0, 0",
    "semget": "64, 190, 0, 1, 0o1600",
    "msgget": "68, 186, 0, 0o1600",
    "mq_open": "240, 180, 0, 0o100, 0o600, 0",
    "memfd_create": "319, 279, 0, 0",
    "memfd_secret": "447, 447, 0",
    "vmsplice": "278, 75, 0, 0, 0, 0",
    "tee": "276, 77, 0, 1, 1, 0",
    "personality": "135, 92, 0x0040000",
    "seccomp": "317, 277, 1, 0, 0",
    "landlock_create_ruleset": "444, 444, 0, 0, 1",
    "init_module": "175, 105, 0, 0, 0",
    "kexec_load": "246, 104, 0, 0, 0, 0",
    "reboot": "169, 142, 0, 0, 0, 0",
    "swapon": "167, 224, 0, 0",
    "syslog": "103, 116, 3, 0, 0",
    "acct": "163, 89, 0",
    "quotactl": "179, 60, 0, 0, 0, 0",
    "sethostname": "170, 161, 0, 0",
    "settimeofday": "164, 170, 0, 0",
    "adjtimex": "159, 171, 0",
    "inotify_init1": "294, 26, 0",
    "fanotify_init": "300, 262, 0, 0",
    "mlockall": "151, 230, 1",
    "mbind": "237, 235, 0, 0, 0, 0, 0, 0",
    "setuid": "105, 146, 0",
    "capset": "126, 91, 0, 0",
    "socket": "41, 198, 1, 1, 0",
    "setsockopt": "54, 208, 0, 0, 0, 0, 0",
}


def test_the_kernel_answers_no_call_that_is_not_on_the_list(run: Run, run_filtered: Run) -> None:
    program = LIBC + "".join(f"print({name!r}, call({arguments}))\n" for name, arguments in CALLS.items())
    for sandbox in (run, run_filtered):
        assert dict(line.split() for line in sandbox(program).stdout.splitlines()) == dict.fromkeys(CALLS, "ENOSYS")


ARGUMENTS = {
    "a user namespace": "call(56, 220, 0x10000000 | 17, 0, 0, 0, 0)",
    "every namespace": "call(56, 220, 0x7E020000 | 17, 0, 0, 0, 0)",
    "signals of a descriptor to others": "call(72, 25, 0, 8, 1)",
    "another signal of a descriptor": "call(72, 25, 0, 10, 9)",
    "a larger pipe": "call(72, 25, 0, 1031, 1 << 20)",
    "input for a terminal": "call(16, 29, 0, 0x5412, 0)",
    "core dumps that can be read": "call(157, 167, 4, 1, 0, 0, 0)",
    "life after the supervisor": "call(157, 167, 1, 0, 0, 0, 0)",
    "a filter of its own": "call(157, 167, 22, 2, 0, 0, 0)",
    "a subreaper": "call(157, 167, 36, 1, 0, 0, 0)",
    "a pair of network sockets": "call(53, 199, 2, 1, 0, 0)",
}


def test_calls_with_other_arguments_than_programs_need_are_refused(run: Run) -> None:
    program = LIBC + "".join(f"print({attempt})\n" for attempt in ARGUMENTS.values())
    assert run(program).stdout.split() == ["EPERM"] * len(ARGUMENTS)


def test_the_list_holds_in_threads_children_and_other_programs(run: Run) -> None:
    ask = f"{LIBC}print(call({CALLS['bpf']}), flush=True)"
    program = f"""
import os, subprocess, sys, threading
thread = threading.Thread(target=exec, args=({ask!r}, {{}}))
thread.start()
thread.join()
if os.fork() == 0:
    exec({ask!r})
    os._exit(0)
os.wait()
subprocess.run([sys.executable, "-c", {ask!r}])
"""
    assert run(program).stdout.split() == ["ENOSYS"] * 3


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="other machines have one way into the kernel")
def test_neither_do_the_other_ways_into_the_kernel_help(run: Run) -> None:
    assert run(LIBC + "print(call(0x40000000 | 39, 0))").stdout == "ENOSYS\n"  # getpid of the x32 interface
    program = """
import ctypes, mmap
area = mmap.mmap(-1, 4096, prot=7)
area.write(b"\\xb8\\x14\\x00\\x00\\x00\\xcd\\x80\\xc3")  # mov eax, 20; int 0x80; ret: getpid of 32-bit programs
print(ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(area)))())
"""
    result = run(program)
    assert (result.returncode, result.stdout) == (-31, "")  # SIGSYS


# Memory that is not in the address space. Each prints how many MiB it got hold of.

HOLD = """
import ctypes, os, socket, sys
libc = ctypes.CDLL(None, use_errno=True)
MIB = 1 << 20
def shared_segments():
    libc.shmat.restype = ctypes.c_void_p
    for held in range(0, 1536, 64):
        segment = libc.shmget(0, 64 * MIB, 0o1600)
        if segment < 0: return held
        place = libc.shmat(segment, None, 0)
        ctypes.memset(place, 1, 64 * MIB)
        libc.shmdt(ctypes.c_void_p(place))
def files_in_memory():
    held = 0
    for _ in range(40):
        try:
            file = os.memfd_create("x")
            held += os.write(file, bytes(4 * MIB)) // MIB
        except OSError: break
    return held
def posix_segments():
    held = 0
    for number in range(40):
        file = libc.shm_open(b"/x%d" % number, os.O_CREAT | os.O_RDWR, 0o600)
        if file < 0: break
        held += os.write(file, bytes(4 * MIB)) // MIB
    return held
def full(pairs):
    held = 0
    try:
        while True:
            for end in pairs():
                os.set_blocking(end, False)
                try:
                    while True: held += os.write(end, bytes(65536))
                except OSError: pass
    except OSError: pass
    return held / MIB
kept = []
def sockets():
    kept.append(socket.socketpair())
    return [end.fileno() for end in kept[-1]]
def pipes():
    return os.pipe()[1:]
def names():
    count = 0
    try:
        while True:
            os.mkdir(str(count))
            count += 1
    except OSError: pass
    return count / 1024
"""


try:
    SOCKET_MIB = int(Path("/proc/sys/net/core/wmem_default").read_text()) / 2**20
except OSError:
    SOCKET_MIB = 0.21
"""What a socket holds."""


@pytest.mark.parametrize(
    ("attempt", "bound"),
    [
        ("shared_segments()", 0),
        ("files_in_memory()", 0),
        ("posix_segments()", 0),
        ("full(sockets)", 32 * 2 * (SOCKET_MIB + 0.07)),  # 32 pairs, two directions, and the last write
        ("full(pipes)", 32 * 0.07),  # 32 pairs of 64 KiB
        ("names()", 8),  # a KiB of the kernel's memory each
    ],
)
def test_little_memory_is_held_outside_the_address_space(run: Run, attempt: str, bound: float) -> None:
    result = run(f"{HOLD}print({attempt})")
    assert float(result.stdout) <= bound, result.stderr


def test_limits_cannot_be_raised(run: Run) -> None:
    program = """
import resource
for name in ("AS", "CPU", "FSIZE", "NOFILE", "NPROC", "CORE"):
    number = getattr(resource, f"RLIMIT_{name}")
    soft, hard = resource.getrlimit(number)
    for wanted in ((hard + 1, hard + 1), (resource.RLIM_INFINITY,) * 2):
        try: resource.setrlimit(number, wanted)
        except (OSError, ValueError): continue
        print("raised", name)
"""
    assert (run(program).returncode, run(program).stdout) == (0, "")


# Where there is neither a namespace nor Landlock, the list still keeps some guarantees.


def test_the_list_alone_prevents_the_network_and_signals(run_filtered: Run) -> None:
    program = f"""
import os, socket, signal, sys
for attempt in (
    *(lambda family=family: socket.socket(family) for family in (1, 2, 10, 16, 17, 38, 40)),
    lambda: os.kill({os.getpid()}, 0),
    lambda: os.kill(os.getppid(), 9),
    lambda: os.kill(-1, 9),
    lambda: os.killpg(0, 9),
):
    try: attempt()
    except OSError: print("refused")
    else: print("through")
sys.stdout.flush()
os.abort()
"""
    result = run_filtered(program)
    assert result.stdout.split() == ["refused"] * 11
    assert result.returncode == -6  # it may still end itself


def test_nothing_outlives_a_program_without_namespaces_either(run_filtered: Run) -> None:
    mark = f"orphan-{os.getpid()}"
    program = f"""
import os, subprocess, sys
for _ in range(2):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(60)", "{mark}"])
        os._exit(0)
    os.wait()
print("left")
"""
    assert run_filtered(program).stdout == "left\n"
    lines = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            lines.append((entry / "cmdline").read_text())
    assert [line for line in lines if mark in line] == []


# What programs do need

ORDINARY = {
    "threads": """
import threading
thread = threading.Thread(target=print, args=("ok",))
thread.start()
thread.join()""",
    "a pool of threads": """
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(4) as pool: print(*pool.map(str, ["ok"]))""",
    "asyncio": """
import asyncio
async def f():
    await asyncio.sleep(0)
    return "ok"
print(asyncio.run(f()))""",
    "child processes": """
import subprocess, sys
print(subprocess.run([sys.executable, "-c", "print('ok')"], capture_output=True, text=True).stdout.strip())""",
    "fork and wait": """
import os
if os.fork() == 0: os._exit(7)
print("ok" if os.waitstatus_to_exitcode(os.wait()[1]) == 7 else "no")""",
    "terminating a child": """
import subprocess
child = subprocess.Popen(["sleep", "9"])
child.terminate()
child.wait()
print("ok")""",
    "pipes between processes": """
import multiprocessing
a, b = multiprocessing.Pipe()
a.send("ok")
print(b.recv())""",
    "signals": """
import signal
signal.signal(signal.SIGALRM, lambda *_: print("ok"))
signal.setitimer(signal.ITIMER_REAL, 0.05)
signal.pause()""",
    "temporary files": """
import tempfile, shutil, os
with tempfile.TemporaryDirectory() as d:
    with open(d + "/a", "w") as file: file.write("ok")
    shutil.copy2(d + "/a", d + "/b")
    os.rename(d + "/b", d + "/c")
    print(open(d + "/c").read())""",
    "mapped files": """
import mmap
with open("f", "wb") as file: file.write(b"ok")
with open("f", "r+b") as file: print(mmap.mmap(file.fileno(), 0)[:].decode())""",
    "sqlite": """
import sqlite3
data = sqlite3.connect("x.db")
data.execute("create table t (a)")
data.execute("insert into t values ('ok')")
data.commit()
print(*data.execute("select a from t").fetchone())""",
    "clocks": """
import datetime, time, zoneinfo
time.sleep(0.001)
datetime.datetime.now(datetime.timezone.utc)
print("ok")""",
    "randomness": """
import os, random, secrets, uuid
random.random(), secrets.token_hex(), uuid.uuid4(), os.urandom(4)
print("ok")""",
    "waiting for descriptors": """
import os, select
ours, theirs = os.pipe()
os.write(theirs, b"ok")
poll = select.epoll()
poll.register(ours)
poll.poll(1)
print(os.read(ours, 2).decode())""",
    "compression and hashes": """
import bz2, gzip, hashlib, lzma, zlib
hashlib.sha256(b""), lzma.compress(b"")
print("ok")""",
    "measurements": """
import os, platform, resource
resource.getrusage(0), platform.platform(), os.cpu_count(), os.sched_getaffinity(0)
print("ok")""",
    "memory": """
data = bytearray(50 << 20)
del data
print("ok")""",
}


@pytest.mark.parametrize("program", ORDINARY.values(), ids=ORDINARY.keys())
def test_ordinary_programs_work(run: Run, program: str) -> None:
    result = run(program)
    assert (result.stdout, result.stderr) == ("ok\n", "")


# The table and the filter


def module(name: str) -> dict[str, object]:
    """A module of what runs inside, which no import path holds."""
    sys.path.insert(0, str(CONFINEMENT))
    try:
        return vars(__import__(name))
    finally:
        sys.path.remove(str(CONFINEMENT))


@pytest.mark.parametrize(("column", "architecture"), [(1, 0xC000003E), (2, 0xC00000B7)], ids=["x86_64", "aarch64"])
def test_numbers_are_those_of_libseccomp(column: int, architecture: int) -> None:
    try:
        library = ctypes.CDLL("libseccomp.so.2")
    except OSError:
        pytest.skip("no libseccomp")
    find = library.seccomp_syscall_resolve_name_arch
    find.argtypes = [ctypes.c_uint32, ctypes.c_char_p]
    numbers = module("syscalls")["numbers"](column)  # type: ignore[operator]
    assert len(numbers) > 150
    assert numbers == {name: find(architecture, name.encode()) for name in numbers}


def decide(code: list[tuple[int, int, int, int]], architecture: int, number: int, arguments: list[int]) -> int:
    """What the kernel's machine makes of a call: four of its operations, from its documentation."""
    data = {0: number, 4: architecture, **{16 + 8 * index: value for index, value in enumerate(arguments)}}
    place = accumulator = 0
    while True:
        operation, if_true, if_false, operand = code[place]
        place += 1
        match operation:
            case 0x20:
                accumulator = data[operand]
            case 0x15:
                place += if_true if accumulator == operand else if_false
            case 0x45:
                place += if_true if accumulator & operand else if_false
            case 0x06:
                return operand


@pytest.mark.parametrize(("machine", "column", "architecture"), [("x86_64", 1, 0xC000003E), ("aarch64", 2, 0xC00000B7)])
def test_the_filter_decides_as_the_table_says(machine: str, column: int, architecture: int) -> None:
    allow, unknown, refused, kill = 0x7FFF0000, 0x50000 + 38, 0x50000 + 1, 0x80000000
    numbers = module("syscalls")["numbers"](column)  # type: ignore[operator]
    names = {number: name for name, number in numbers.items()}
    for may_signal in (True, False):
        code = module("seccomp")["assemble"](machine, may_signal, process=77)  # type: ignore[operator]
        for number in (*range(600), 0x40000000, 0x40000001, 0xFFFFFFFF):
            expected = allow if number in names else unknown
            if names.get(number) in ("kill", "tkill") and not may_signal:
                expected = refused
            if names.get(number) in ("fcntl", "ioctl", "prctl", "socketpair"):
                expected = refused  # with an argument that is on no list
            if names.get(number) == "tgkill" and not may_signal:
                expected = refused
            assert decide(code, architecture, number, [99999] * 2) == expected, (number, names.get(number))
        assert decide(code, architecture, numbers["tgkill"], [77, 78]) == allow
        assert decide(code, architecture, numbers["fcntl"], [0, 3]) == allow
        assert decide(code, architecture, numbers["clone"], [0x003D0F00]) == allow  # a thread
        assert decide(code, architecture, numbers["clone"], [0x10000011]) == refused
        assert decide(code, 0x40000003, 20, []) == kill
        assert len(code) < 4096  # the kernel takes no more


def test_an_unknown_machine_has_no_list(raises: Raises) -> None:
    with raises(OSError, "riscv64"):
        module("seccomp")["assemble"]("riscv64", True)  # type: ignore[operator]


def test_the_exit_codes_of_the_judge_are_known_outside() -> None:
    text = (INSIDE / "judge.py").read_text()
    told = dict(re.findall(r"^(PEER_IS_GONE|TAMPERED) = (\d+)", text, re.MULTILINE))
    from nemorl_tasks.code import sandbox

    assert told == {"PEER_IS_GONE": str(sandbox.PEER_IS_GONE), "TAMPERED": str(sandbox.TAMPERED)}
