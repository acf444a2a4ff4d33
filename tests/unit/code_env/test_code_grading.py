"""Attacks on grades: programs that do not solve the task and try to be rewarded all the same."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from nemorl.errors import BackendError, PluginError
from nemorl.types import Prompt, Score
from nemorl_rl.environments import EnvironmentPool
from nemorl_tasks.code import CodeConfig, sandbox
from nemorl_tasks.code.environment import CodeEnvironment
from nemorl_tasks.code.server import Server, _Process
from recorded_messages import Raises

ASSERTS = [
    "import math",
    "assert add(1, 2) == 3",
    "assert add(2, 2) == 4 and add(5, 0) in [5]",
    "assert not add(1, -1)",
]
"""Three tests that count, since the first only sets up."""


def built(**options: Any) -> CodeEnvironment:
    try:
        return CodeEnvironment(CodeConfig(**{"timeout_s": 20.0, "memory_mib": 256, **options}))
    except PluginError as error:
        pytest.skip(f"this machine cannot isolate programs: {error.message}")


@pytest.fixture(scope="module")
def environment() -> Any:
    environment = built()
    yield environment
    environment.close()


def grade(environment: CodeEnvironment, program: str, tests: Any = ASSERTS) -> Score:
    pool = EnvironmentPool(environment, timeout_s=60)
    prompt = Prompt(0, "Add.", (1,), row={"tests": tests})
    (step,) = pool.step([pool.start(prompt)], [f"```python\n{program}\n```"])
    return step.score


def happened(found: Score) -> set[str]:
    return {name for name, value in found.metrics.items() if value and name not in ("tests_passed", "code_unproven")}


WRONG = "def add(a, b): return 7"
FORGER = """
class Forger(int):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __bool__(self): return False
    __lt__ = __le__ = __gt__ = __ge__ = __contains__ = __eq__
    __hash__ = int.__hash__
    def __getattr__(self, name): return lambda *args, **named: self
"""
PROXY = FORGER.replace("(int)", "").replace("int.", "object.")
SPEAK = """
import os, sys, json
def speak(data, fds=range(3, 64)):
    for fd in fds:
        try: os.write(fd, data)
        except OSError: pass
def message(**fields):
    text = json.dumps(fields).encode()
    return len(text).to_bytes(4, "big") + text
def nonce():
    frame = sys._getframe()
    while "request" not in frame.f_locals: frame = frame.f_back
    return frame.f_locals["request"]["nonce"]
"""
"""For programs that write to the judge's pipe; the nonce is in a frame of the driver, which they can walk to."""

TRICKS = {
    "equal to everything": f"{FORGER}def add(a, b): return Forger(7)",
    "equal to everything, of no plain type": f"{PROXY}def add(a, b): return Forger()",
    "a list of equal things": f"{FORGER}def add(a, b): return [Forger(7)]",
    "claims to be an integer": """
class Liar:
    __class__ = int
    def __eq__(self, other): return True
    def __hash__(self): return 0
def add(a, b): return Liar()""",
    "not a number": "def add(a, b): return float('nan')",
    "exits with success": "import os\ndef add(a, b): os._exit(0)",
    "exits while loading": "import sys\nprint('passed')\nsys.exit(0)",
    "exits with the judge's own codes": "import os\ndef add(a, b): os._exit(4)",
    "segmentation fault after printing": """
import ctypes
def add(a, b):
    print('"passed"', flush=True)
    ctypes.string_at(0)""",
    "stack overflow": "def add(a, b): return add(a, b)",
    "stack overflow in C": """
import sys
sys.setrecursionlimit(10**7)
def add(a, b):
    nested = []
    for _ in range(10**6): nested = [nested]
    return repr(nested)""",
    "success at exit": """
import atexit, os
atexit.register(lambda: (print('"passed"'), os._exit(0)))
def add(a, b): 1 / 0""",
    "success from a thread that stays": f"""
import threading, time
def shout():
    while True:
        print('"passed"', flush=True)
        time.sleep(0.01)
threading.Thread(target=shout).start()
{WRONG}""",
    "verdicts on every descriptor": SPEAK + "speak(b'\"passed\"\\n' * 4, range(3))\n" + WRONG,
    "other built-ins": f"""
import builtins
for name in ("all", "any", "len", "isinstance", "repr", "compile", "exec"):
    setattr(builtins, name, lambda *args, **named: True)
{WRONG}""",
    "names that shadow the judge's": f"""
all = any = isinstance = sorted = set = bool = math = lambda *args: True
{WRONG}""",
    "no AssertionError": f"import builtins\nbuiltins.AssertionError = KeyboardInterrupt\n{WRONG}",
    "json that lies": f"import json\njson.dumps = lambda *args, **named: '{{\"value\": 30}}'\n{WRONG}",
    "a loader that lies": f"""
import importlib.machinery
importlib.machinery.SourceFileLoader.exec_module = lambda self, module: None
{WRONG}""",
    "tests of its own on disk": f"""
for number in range(9):
    open(f"test_{{number}}.py", "w").write("pass")
{WRONG}""",
    "modules of its own for the judge": f"""
for name in ("math", "json", "judge", "wire"):
    open(f"{{name}}.py", "w").write("raise SystemExit(0)")
{WRONG}""",
    "frames up to the tests": """
import sys
def add(a, b):
    frame, seen = sys._getframe(), ""
    while frame := frame.f_back: seen += repr(frame.f_locals) + repr(frame.f_globals)
    return a + b if "assert " + "add" in seen else 7""",
    "objects up to the tests": """
import gc
def add(a, b):
    found = [v for item in gc.get_objects() if type(item) is dict for v in item.values() if type(v) is str]
    return a + b if any("assert " + "add" in text for text in found) else 7""",
    "memory up to the tests": """
def add(a, b):
    for path in ("/proc/self/mem", "/proc/1/mem", "/proc/self/maps", "/proc/1/environ", "/proc/1/cmdline"):
        try: open(path, "rb").read(1)
        except OSError: continue
        return a + b
    return 7""",
    "StopIteration": "def add(a, b): raise StopIteration",
    "an exception that is none": "class Odd(BaseException): pass\ndef add(a, b): raise Odd",
    "signals to the supervisor": """
import os
def add(a, b):
    for number in range(1, 65):
        try: os.kill(os.getppid(), number)
        except OSError: pass
    return 7""",
    "sleep": "import time\ndef add(a, b):\n    time.sleep(0.01)\n    return 7",
    "a child that answers too": """
import os
def add(a, b):
    if os.fork() == 0: return 30
    os.wait()
    return 7""",
    "a function that is none": "add = 7",
    "another module in its place": """
import sys
class Module: add = property(lambda self: 7)
sys.modules["solution"] = Module()""",
}


@pytest.mark.parametrize("program", TRICKS.values(), ids=TRICKS.keys())
def test_no_trick_passes_a_test(environment: CodeEnvironment, program: str) -> None:
    assert grade(environment, program).reward == 0.0


@pytest.mark.parametrize(
    "method", ["return Forger(7)", "return self", "raise StopIteration", "self.__class__ = Forger\n        return self"]
)
def test_objects_of_the_program_pass_no_test_in_its_place(environment: CodeEnvironment, method: str) -> None:
    program = f"{PROXY}class Solution(Forger):\n    def double(self, x):\n        {method}"
    tests = ["assert Solution().double(4) == 8", "s = Solution()\nassert s.double(2) == 4 and s.size == 3"]
    assert grade(environment, program, tests).reward == 0.0


def test_the_same_tests_pass_a_program_that_solves_them(environment: CodeEnvironment) -> None:
    assert grade(environment, "def add(a, b): return a + b").reward == 1.0
    assert grade(environment, "def add(a, b): return 3").reward == pytest.approx(1 / 3)


EARLY = {
    "early": "message(value=3)",
    "early, with a nonce": "message(value=3, nonce='0' * 16)",
}
ON_CALL = {
    "wrong nonce": "message(value=a + b, nonce='0' * 16)",
    "two replies": "message(value=30, nonce=nonce()) * 2",
    "length beyond the limit": r"b'\xff\xff\xff\xff' + b'x' * 1000",
    "length too short": r"b'\x00\x00\x00\x02{}}}}}'",
    "no object": r"b'\x00\x00\x00\x04true'",
    "no UTF-8": r"b'\x00\x00\x00\x04\xff\xfe\xfd\xfc'",
    "depth": "(50000).to_bytes(4, 'big') + b'[' * 50000",
    "a value of no kind": "message(value=['__reduce__', []], nonce=nonce())",
    "a set of lists": "message(value=['set', [['list', []]]], nonce=nonce())",
    "an object where data is asked for": "message(object=0, nonce=nonce())",
    "more than was asked": "message(value=a + b, verdict='passed', nonce=nonce())",
}
FORGERIES = {name: f"{SPEAK}speak({data})\n{WRONG}" for name, data in EARLY.items()} | {
    name: f"{SPEAK}def add(a, b):\n    speak({data})\n    return 7" for name, data in ON_CALL.items()
}


@pytest.mark.parametrize("program", FORGERIES.values(), ids=FORGERIES.keys())
def test_forged_replies_are_counted_and_pass_nothing(environment: CodeEnvironment, program: str) -> None:
    found = grade(environment, program)
    assert (found.reward, happened(found)) == (0.0, {"code_tampered"})


def test_a_program_that_breaks_off_passes_no_later_test(environment: CodeEnvironment) -> None:
    program = "import os\ndef add(a, b):\n    if a == 2: os._exit(0)\n    return a + b"
    tests = [
        "assert add(1, 2) == 3",
        "try:\n    x = add(2, 2)\nexcept BaseException:\n    x = 0\nassert x in (0, 4)",
        "assert add(0, 0) == 0",
    ]
    assert grade(environment, program, tests).reward == pytest.approx(1 / 3)


def test_exceptions_of_the_program_end_no_iteration_of_the_judge(environment: CodeEnvironment) -> None:
    # In one process all(map(f, xs)) holds when f raises StopIteration at the first item.
    found = grade(
        environment, "def ok(x): raise StopIteration", ["assert all(map(ok, [1, 2]))", "assert [*map(ok, [1])] == []"]
    )
    assert found.reward == 0.0


def test_a_program_knows_no_test(environment: CodeEnvironment) -> None:
    program = """
import os, sys
seen = []
for root, folders, files in os.walk("."): seen += files
for fd in range(64):
    try: seen.append(str(os.fstat(fd).st_mode))
    except OSError: pass
seen += sys.argv + sys.orig_argv + list(os.environ.values())
def look(secret): return any("31415" in text for text in seen) or seen[:1] != ["solution.py"]
"""
    assert grade(environment, program, ["assert look(1) is False or 31415 == 0"]).reward == 1.0


@pytest.mark.parametrize(
    "program",
    [
        "import os; os.kill(os.getppid(), 2)",
        "import os\nfor number in range(1, 65):\n    try: os.kill(1, number)\n    except OSError: pass",
        "import os, signal; os.killpg(0, signal.SIGKILL)",
        "import os; os.kill(-1, 9)",
        "import os\nfor pid in range(2, 3000):\n    try: os.kill(pid, 9)\n    except OSError: pass",
    ],
    ids=["interrupt", "every signal", "its group", "everyone", "every number"],
)
def test_signals_neither_end_the_run_nor_pass_a_test(environment: CodeEnvironment, program: str) -> None:
    found = grade(environment, f"{program}\nprint(3)", [{"input": "", "output": "5"}])
    assert (found.reward, happened(found) <= {"code_error"}) == (0.0, True)
    assert grade(environment, "print(5)", [{"input": "", "output": "5"}]).reward == 1.0


def below(pid: int) -> list[int]:
    """Child processes."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if int((entry / "stat").read_text().rpartition(")")[2].split()[1]) == pid:
                    found.append(int(entry.name))
    return found


def generations(server: int, programs: int) -> list[list[int]]:
    """Keeper, gates, supervisors and programs, as soon as there are so many of these."""
    for _ in range(1000):
        found = [[server]]
        for _ in range(4):
            found.append([child for pid in found[-1] for child in below(pid)])
        if len(found[-1]) == programs:
            return found[1:]
        time.sleep(0.01)
    raise AssertionError("the programs do not run")


@pytest.mark.parametrize(("who", "depth"), [("keeper", 0), ("gate", 1), ("supervisor", 2)])
@pytest.mark.parametrize(
    ("tests", "programs"),
    [([{"input": "", "output": "5"}], 1), (["assert add(1, 2) == 3"], 2)],
    ids=["pair", "asserts"],
)
def test_a_sandbox_that_dies_scores_the_program_that_was_in_it(
    environment: CodeEnvironment, who: str, depth: int, tests: Any, programs: int
) -> None:
    (server,) = [pid for pid in below(os.getpid()) if "inside" in Path(f"/proc/{pid}/cmdline").read_text()]
    grade(environment, "pass", tests)  # tries the row, whose decoys are programs too
    with ThreadPoolExecutor(1) as threads:
        score = threads.submit(grade, environment, "import time\ntime.sleep(15)", tests)
        for pid in generations(server, programs)[depth]:
            with contextlib.suppress(ProcessLookupError):  # with the first of them the other one ends
                os.kill(pid, 9)
        found = score.result()
    assert (found.reward, happened(found)) == (0.0, {"code_sandbox_died"})


def test_programs_go_on_after_the_death_of_the_server(environment: CodeEnvironment) -> None:
    (server,) = [pid for pid in below(os.getpid()) if "inside" in Path(f"/proc/{pid}/cmdline").read_text()]
    os.kill(server, 9)
    assert grade(environment, "def add(a, b): return a + b").reward == 1.0


def test_what_nobody_holds_any_more_leaves_no_process() -> None:
    """At once: nothing in it refers back to it, so no garbage has to be collected first."""
    before = set(below(os.getpid()))
    environment = built()
    assert grade(environment, "def add(a, b): return a + b").reward == 1.0
    assert set(below(os.getpid())) - before
    gc.disable()
    try:
        del environment
        assert set(below(os.getpid())) <= before
    finally:
        gc.enable()


class Dying(Server):
    """Its first processes, so many of them, die or stand still with the request that they were sent unread."""

    def __init__(self, deaths: int, *, stand_still: bool = False) -> None:
        super().__init__(sys.executable)
        self.deaths, self.stand_still = deaths, stand_still

    def start(self, fds: Sequence[int]) -> _Process:
        if self.stand_still:  # such a one gets an instant, those after it all the time that a busy machine takes
            sandbox.START_S = 0.2 if self.deaths else 60.0
        if not self.deaths:
            return super().start(fds)
        self.deaths -= 1
        self._process = _Process(sys.executable)
        os.kill(self._process._process.pid, signal.SIGSTOP)
        process = super().start(fds)
        if not self.stand_still:
            os.kill(process._process.pid, signal.SIGKILL)
            process._process.wait()  # death takes its time; the next request must not reach this one as well
        return process


@pytest.mark.parametrize("tests", [[{"input": "", "output": "5"}], ["assert add(2, 3) == 5"]], ids=["pair", "asserts"])
def test_a_program_that_was_never_begun_is_run_again(tests: Any) -> None:
    # Of three attempts the third reaches a server that lives.
    environment = built()
    environment.sandbox._server = Dying(2)
    found = grade(environment, "def add(a, b): return a + b\nprint(5)", tests)
    environment.close()
    assert (found.reward, happened(found)) == (1.0, set())


@pytest.mark.parametrize("padding", [0, 150_000], ids=["short", "more than a socket holds"])
def test_a_server_that_stands_still_is_replaced_and_no_programs_fault(
    monkeypatch: pytest.MonkeyPatch, padding: int
) -> None:
    monkeypatch.setattr(sandbox, "START_S", sandbox.START_S)
    monkeypatch.setattr(sandbox, "GRACE_S", 0.5)
    environment = built(timeout_s=60.0)
    environment.sandbox._server = server = Dying(1, stand_still=True)
    found = grade(environment, "print(5) #" + "é" * padding, [{"input": "", "output": "5"}])
    assert (found.reward, happened(found)) == (1.0, set())
    assert server.deaths == 0
    environment.close()


def test_a_server_that_begins_late_takes_no_time_from_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    # The program may take 60 s. Its server moves an hour after it was asked, by the clock of who waits.
    monkeypatch.setattr(sandbox, "START_S", 7200.0)
    environment = built(timeout_s=60.0)
    server = environment.sandbox._server = Server(sys.executable)
    grade(environment, "print(5)", [{"input": "", "output": "5"}])
    assert server._process is not None
    stopped = server._process._process
    os.kill(stopped.pid, signal.SIGSTOP)

    def an_hour_later() -> None:
        monkeypatch.setattr(sandbox, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + 3600))
        stopped.send_signal(signal.SIGCONT)

    later = threading.Timer(0.5, an_hour_later)
    later.start()
    found = grade(environment, "print(5)", [{"input": "", "output": "5"}])
    later.join()
    assert (found.reward, happened(found)) == (1.0, set())
    environment.close()


def test_a_server_that_always_dies_is_given_up(raises: Raises) -> None:
    environment = built()
    environment.sandbox._server = Dying(6)  # three for the program, three for the control
    with raises(BackendError, varies=r"(?<=sandbox )\(\w+\)"):
        grade(environment, "print(5)", [{"input": "", "output": "5"}])
    environment.close()


def test_where_no_program_can_be_run_there_is_an_error_and_no_zero(tmp_path: Path, raises: Raises) -> None:
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", "--copies", tmp_path / "venv"], check=True)
    environment = built(python=python)
    assert grade(environment, "def add(a, b): return a + b").reward == 1.0
    python.unlink()
    with raises(BackendError, varies=r"(?<=sandbox )\(\w+\)"):
        grade(environment, "def add(a, b): return a + b")
    environment.close()
