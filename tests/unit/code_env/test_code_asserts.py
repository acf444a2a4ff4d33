"""Which assert statements can be judged with plain data, that they are judged rightly, and which are refused."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nemorl_tasks.code
import pytest
from nemorl.errors import DataError, PluginError
from nemorl.types import Prompt, Score
from nemorl_rl.environments import EnvironmentPool
from nemorl_tasks.code import CodeConfig
from nemorl_tasks.code.environment import CodeEnvironment
from recorded_messages import Raises


@pytest.fixture(scope="module")
def environment() -> Iterator[CodeEnvironment]:
    try:
        built = CodeEnvironment(CodeConfig(timeout_s=20.0))
    except PluginError as error:
        pytest.skip(f"this machine cannot isolate programs: {error.message}")
    yield built
    built.close()


def score(environment: CodeEnvironment, program: str, tests: Any, **row: Any) -> Score:
    pool = EnvironmentPool(environment, timeout_s=60)
    prompt = Prompt(0, "Do it.", (1,), row={"tests": tests, **row})
    (step,) = pool.step([pool.start(prompt)], [f"```python\n{program}\n```"])
    return step.score


def reward(environment: CodeEnvironment, program: str, tests: Any, **row: Any) -> float:
    return score(environment, program, tests, **row).reward


NODE = "class Node:\n    def __init__(self, value): self.value, self.left, self.right = value, None, None\n"
PAIR = "class Pair:\n    def __init__(self, a, b): self.a, self.b = a, b\n"
POINT = "class Point:\n    def __init__(self, x): self.x = x\n    def twice(self): return self.x * %d"
EXPRESSIBLE: dict[str, tuple[list[str], str, str]] = {
    "a checking function": (
        ["METADATA = {}\ndef check(candidate):\n    assert candidate([1, 2]) == 3", "check(total)"],
        "def total(xs): return sum(xs)",
        "def total(xs): return 0",
    ),
    "a module that nobody imported": (
        ["assert math.isclose(half(3), 1.5)"],
        "half = lambda x: x / 2",
        "half = lambda x: x",
    ),
    "an import of the program": (
        ["from solution import sum\nassert sum(10, 15) == 6"],
        "def sum(a, b): return 6",
        "def sum(a, b): return 7",
    ),
    "a built-in name": (["assert sum(10, 15) == 6"], "def sum(a, b): return 6", "def sum(a, b): return 7"),
    "a capitalized function": (
        ["assert Find([[1], [2, 3]]) == [2, 3]"],
        "def Find(x): return x[1]",
        "def Find(x): return 1",
    ),
    "an object's methods": (
        ["assert Solution().double(4) == 8"],
        "class Solution:\n    def double(self, x): return 2 * x",
        "class Solution:\n    def double(self, x): return x",
    ),
    "an object over several tests": (
        ["p = Point(2)\nassert p.x == 2", "assert p.twice() == 4"],
        POINT % 2,
        "class Point:\n    def __init__(self, x): self.x = 0\n    def twice(self): return 0",
    ),
    "the length and items of an object": (
        ["s = Stack()\ns.push(7)\nassert len(s) == 1 and s[0] == 7 and 7 in s and s.pop() == 7"],
        "class Stack(list):\n    push = list.append",
        "class Stack(list):\n    def push(self, x): self.append(0)",
    ),
    "objects as arguments": (
        ["assert longest([Pair(1, 5), Pair(2, 3)]) == 4"],
        PAIR + "def longest(ps): return max(p.b - p.a for p in ps)",
        PAIR + "def longest(ps): return len(ps)",
    ),
    "linked objects": (
        [
            "root = Node(1)\nroot.left = Node(2)\nroot.left.right = Node(3)\n"
            "assert depth(root) == 3 and root.left.value == 2"
        ],
        NODE + "def depth(n): return 1 + max(depth(n.left), depth(n.right)) if n else 0",
        NODE + "def depth(n): return 1",
    ),
    "exceptions": (
        [
            "try:\n    root(-1)\n    raise AssertionError\n"
            "except ValueError as error:\n    assert 'negative' in str(error)"
        ],
        "def root(x): raise ValueError('negative')",
        "def root(x): return 0",
    ),
    "an iterator": (["assert list(up(3)) == [0, 1, 2]"], "def up(n): yield from range(n)", "def up(n): yield n"),
    "subclasses of plain types": (
        ["assert count('aab') == {'a': 2, 'b': 1}", "assert first((1, 2)) == (1, 2)"],
        "from collections import Counter as count, namedtuple\nfirst = lambda p: namedtuple('P', 'a b')(*p)",
        "count = first = lambda x: [x]",
    ),
    "types as arguments": (
        ["assert only([1, 'a'], int) == [1]"],
        "only = lambda xs, t: [x for x in xs if type(x) is t]",
        "only = 0",
    ),
    "plain data of every kind": (
        [
            f"assert same({value}) == {value} and type(same({value})) is type({value})"
            for value in (
                "None",
                "True",
                "-7",
                "2.5",
                "float('inf')",
                "'ü\\ud800'",
                "b'\\xff'",
                "{1, 2}",
                "{(1, 2): [3.0]}",
            )
        ]
        + ["assert same(3 ** 20000) == 3 ** 20000", "assert same(range(3)) == range(3) and same(1 + 2j) == 1 + 2j"],
        "def same(x): return x",
        "def same(x): return (x,)",
    ),
    "calls from the judge's functions": (
        ["assert sorted([1, -2, 3], key=size) == [1, -2, 3]"],
        "size = abs",
        "size = lambda x: x",
    ),
    "a constant and arguments by name": (
        ["assert add(b=LIMIT, a=1) == 6"],
        "LIMIT = 5\ndef add(a, b): return a + b",
        "LIMIT = 5",
    ),
    "a result as argument": (["assert inc(inc(1)) == 3"], "def inc(x): return x + 1", "def inc(x): return x"),
}


@pytest.mark.parametrize(("tests", "right", "wrong"), EXPRESSIBLE.values(), ids=EXPRESSIBLE.keys())
def test_tests_are_judged_through_plain_data(
    environment: CodeEnvironment, tests: list[str], right: str, wrong: str
) -> None:
    assert (reward(environment, right, tests), reward(environment, wrong, tests)) == (1.0, 0.0)


REFUSED = {
    "assert f(": "it is no Python",
    "(" * 5000 + "f()" + ")" * 5000: "it is no Python",
    "import no_such_module\nassert f(1) == 2": "ModuleNotFoundError",
    "assert 1 + 1 == 3": "AssertionError",
    "assert 1 + 1 == 2": "no test checks what the program does",
    "def test(): assert f(1) == 2": "no test checks what the program does",
    "x = f(1)": "no test checks what the program does",
    "xs = []\nxs.append(f(1) + 1)": "no test checks what the program does",
    "assert f(lambda: 1) == 2": "an argument is an object of type function",
    "def g(): pass\nassert f(1, key=g) == 2": "an argument is an object of type function",
    "import fractions\nassert f(fractions.Fraction(1, 2)) == 2": "an argument is an object of type Fraction",
}


@pytest.mark.parametrize("program", ["def f(x): return 2", "1 / 0", "import os; os._exit(0)"])
@pytest.mark.parametrize("test", REFUSED, ids=range(len(REFUSED)))
def test_what_no_program_can_pass_is_refused_whatever_the_program(
    environment: CodeEnvironment, test: str, program: str
) -> None:
    with pytest.raises(DataError, match=REFUSED[test]):
        reward(environment, program, [test])


def test_a_row_is_refused_by_name(environment: CodeEnvironment, raises: Raises) -> None:
    with raises(DataError, "tests", 1, "input/output"):
        reward(environment, "def f(x): return 2", ["import math", "import no_such_module", "assert f(1) == 2"])


COUNTED: dict[str, tuple[list[str], list[bool]]] = {
    "an alias": (["g = f", "assert g(1) == 2"], [False, True]),
    "an alias of what was returned": (["x = f(1)", "y = x", "assert y == 2"], [False, False, True]),
    "a closure": (
        ["def make():\n    x = f(1)\n    return lambda: x", "h = make()", "assert h() == 2"],
        [False, False, True],
    ),
    "a default value": (["def h(x=f(1)): return x", "assert h() == 2"], [False, True]),
    "state of a module": (
        ["import random", "random.seed(f(1))", "import random as r\nassert r.random() == 0.5"],
        [False, False, True],
    ),
    "an attribute of a module": (
        ["import math", "math.mine = f(1)", "assert vars(math)['mine'] == 2"],
        [False, False, True],
    ),
    "a name that is made": (["globals()['x'] = f(1)", "assert eval('x') == 2"], [False, True]),
    "a default dictionary": (
        ["from collections import defaultdict\nd = defaultdict(list)", "d[0] += [f(1)]", "assert d == {0: [2]}"],
        [False, False, True],
    ),
    "a generator": (["xs = (f(i) for i in [1])", "assert next(xs) == 2"], [False, True]),
    "a class of the tests": (["class R: pass", "R.x = f(1)", "assert R.x == 2"], [False, False, True]),
    "a heap": (
        ["import heapq", "xs = []", "heapq.heappush(xs, f(1))", "assert xs == [2]"],
        [False, False, False, True],
    ),
    "a check in a function": (["def check():\n    assert f(1) == 2", "check()"], [False, True]),
    "a method": (["s = Box()", "s.put(1)", "assert s.all() == [1]"], [False, False, True]),
    "a truth": (["assert not f(0)", "assert f(1)"], [True, True]),
    "a type": (["assert f(1) is not None", "assert type(f(1)) is not str", "assert f(1) is None"], [True, True, True]),
    "a raise": (["if f(1) != 2: raise ValueError", "x = int(f(1))"], [True, False]),
    "an exception": (["try:\n    f(-1)\n    raise AssertionError\nexcept ValueError:\n    pass"], [True]),
    "nothing of the program": (["xs = [2, 1]", "assert f(xs) == [1, 2]", "assert xs == [2, 1]"], [False, True, False]),
    "a loop that needs an answer": (["n = 0\nwhile f(n): n += 1", "assert n == 3"], [False, True]),
    "a comparison of its own": (
        ["assert 2 == f(1)", "assert f(1) in (2, 3)", "assert [2] == [f(1)]"],
        [True, True, True],
    ),
}


@pytest.mark.parametrize(("tests", "counts"), COUNTED.values(), ids=COUNTED.keys())
def test_what_counts_is_found_by_running_the_tests(
    environment: CodeEnvironment, tests: list[str], counts: list[bool]
) -> None:
    asserts = environment._trials.tests(tests, None, "row").asserts
    assert asserts is not None
    assert list(asserts.counts) == counts


KEPT = [
    ["xs = []", "xs.append(f(1))", "assert xs == [2]"],
    ["g = f", "x = g(1)", "y = x", "assert y == 2"],
    ["def make():\n    x = f(1)\n    return lambda: x", "h = make()", "assert h() == 2"],
    ["import math", "math.mine = f(1)", "assert vars(math)['mine'] == 2"],
    ["import decimal", "decimal.getcontext().prec = f(1)", "assert decimal.Decimal(1) / 3 == decimal.Decimal('0.33')"],
    ["class R: pass", "R.x = f(1)", "import math\nassert math.sqrt(R.x + 2) == 2"],
]
"""Rows whose tests depend on a program by other ways than a name of it."""
NINE = "def f(x): return 9"
HOSTILE = {
    "raises at import": "1 / 0",
    "is no Python": "def f(x:",
    "is no text": "\x00\ud800",
    "ends itself": "import sys\nsys.exit(0)",
    "ends itself when called": "import os\ndef f(x): os._exit(0)",
    "raises": "def f(x): raise RecursionError",
    "raises no exception": "class Odd(BaseException): pass\ndef f(x): raise Odd",
    "raises with a name": "class TestRefusedError(Exception): pass\ndef f(x): raise TestRefusedError('refused')",
    "says that it is refused": "def f(x): return 'refused set-up fails'",
    "patches built-in names": "import builtins\nfor n in ('len', 'vars', 'eval'): setattr(builtins, n, None)\n" + NINE,
    "defines names of the tests": "xs = h = make = R = math = check = g = y = None\n" + NINE,
    "defines modules of the tests": "class math:\n    sqrt = staticmethod(lambda x: 2)\nclass decimal: pass\n" + NINE,
    "patches libraries": "import math, random, decimal\nmath.sqrt = random.seed = None\ndecimal.Decimal = 1\n" + NINE,
    "returns itself": "def f(x): return f",
    "returns an object": "def f(x): return object()",
    "returns a generator": "def f(x): yield from (9, 9)",
    "returns a generator without end": "def f(x):\n    while True: yield 1",
    "returns too much": "def f(x): return 'x' * (3 << 20)",
    "returns a list of itself": "def f(x):\n    xs = []\n    xs.append(xs)\n    return xs",
    "returns nothing": "def f(x): pass",
    "returns a type": "def f(x): return float",
    "returns a number beyond": "def f(x): return 10 ** 100",
    "returns no number": "def f(x): return float('nan')",
    "defines nothing": "pass",
    "is a class": "class f:\n    def __init__(self, x): pass\n    def __eq__(self, other): return True",
    "is a module": "import math as f",
    "replaces itself": "import sys\nsys.modules['solution'] = None\n" + NINE,
}


@pytest.mark.parametrize("program", HOSTILE.values(), ids=HOSTILE.keys())
def test_whatever_a_program_does_it_earns_nothing_and_ends_no_run(environment: CodeEnvironment, program: str) -> None:
    assert reward(environment, program, [test for tests in KEPT for test in tests]) == 0.0


@pytest.mark.parametrize("tests", KEPT, ids=range(len(KEPT)))
def test_rows_that_depend_on_a_program_by_other_ways_can_be_passed(
    environment: CodeEnvironment, tests: list[str]
) -> None:
    assert reward(environment, "def f(x): return x + 1", tests) == 1.0


MUTATIONS: tuple[tuple[str, str], ...] = (
    ("return", "yield"),
    ("return", "raise ValueError;"),
    ("return", "import sys; sys.exit(1);"),
    ("def ", "async def "),
    ("(x)", "(x, y)"),
    ("x + 1", "[x + 1]"),
    ("x + 1", "lambda: x"),
    ("x + 1", "open('/etc/passwd')"),
    ("x + 1", "__import__('math')"),
    ("def f", "def g"),
    ("def f", "@property\ndef f"),
    ("def f", "@classmethod\ndef f"),
    ("def f", "del vars, len\ndef f"),
    ("def f", "__builtins__ = {}\ndef f"),
    ("def f", "raise SystemExit\ndef f"),
    ("def f", "import threading; threading.Thread(target=lambda: 1 / 0).start()\ndef f"),
    ("\n", "\n    global xs, R; xs = R = None\n"),
)


@pytest.mark.slow
@pytest.mark.full
def test_mutated_programs_end_no_run(environment: CodeEnvironment) -> None:
    draw = random.Random(0)
    for _ in range(120):
        program = "def f(x):\n    return x + 1"
        for old, new in draw.sample(MUTATIONS, draw.randrange(1, 4)):
            program = program.replace(old, new, 1)
        assert 0.0 <= reward(environment, program, [test for tests in KEPT for test in tests]) <= 1.0, program


def test_a_solution_that_fails_its_tests_is_an_error_of_the_row(environment: CodeEnvironment, raises: Raises) -> None:
    for tests in (["assert f(1) == 2"], [{"input": "1", "output": "2"}]):
        with raises(DataError, 0, "solution_column"):
            reward(environment, "def f(x): return 2", tests, solution="def f(x): return 3\nprint(3)")
    with raises(DataError, "Counter"):
        objects = ["assert f(1).most_common() == [(1, 1)] and f(2) == 3"]
        reward(environment, "pass", objects, solution="class Counter: pass\ndef f(x): return Counter()")


def test_a_solution_in_a_code_block_or_a_list_of_them_is_understood(environment: CodeEnvironment) -> None:
    right = "def f(x): return x + 1"
    for solution in (right, f"So:\n```python\n{right}\n```", [right, "other"], None, ""):
        assert reward(environment, right, ["assert f(1) == 2"], solution=solution) == 1.0


def test_rows_without_a_solution_say_whether_any_program_has_passed_them(environment: CodeEnvironment) -> None:
    tests = ["assert f(1) == 2", "assert f(2) == 3"]  # no other row has them
    half, other = "def f(x): return 2", "def f(x): return 3"
    assert score(environment, half, tests).metrics["code_unproven"] == 1.0
    assert score(environment, other, tests).metrics["code_unproven"] == 0.0  # by now each has been passed once
    tests = ["assert f(2) == 4"]
    assert score(environment, half, tests, solution="def f(x): return 4").metrics["code_unproven"] == 0.0


def test_objects_are_understood_where_tests_use_them(environment: CodeEnvironment) -> None:
    box = "class Box:\n    def __init__(self): self.xs = []\n    def put(self, x): self.xs.append(x); return self\n"
    tests = ["make = Box", "b = make()", "assert b.put(1).put(2).xs == [1, 2]"]
    assert reward(environment, box, tests) == 1.0
    tests = ["assert build().put(3).xs == [3]"]
    assert reward(environment, box + "build = Box", tests) == 1.0


def test_a_name_that_is_no_class_is_no_module_of_the_programs_either(environment: CodeEnvironment) -> None:
    program = "class np:\n    allclose = staticmethod(lambda *a: True)\ndef f(x): return 9"
    assert reward(environment, program, ["assert np.allclose(f(1), 2)"]) == 0.0


def test_no_attribute_of_a_program_makes_its_row_refused(environment: CodeEnvironment) -> None:
    tests = ["assert f(Point.ORIGIN) == 0"]
    assert reward(environment, "class Point:\n    ORIGIN = 3\ndef f(x): return x - 3", tests) == 1.0
    assert reward(environment, "class Point:\n    def ORIGIN(): pass\ndef f(x): return x", tests) == 0.0


@pytest.mark.slow
def test_packages_of_another_environment_serve_the_program_and_its_judge() -> None:
    pytest.importorskip("numpy")
    try:
        built = CodeEnvironment(CodeConfig(timeout_s=20.0, memory_mib=1024, python=Path(sys.executable)))
    except PluginError as error:
        pytest.skip(f"this machine cannot isolate programs: {error.message}")
    tests = [
        "import numpy as np",
        "assert np.allclose(f(2), [[2, 0], [0, 2]])",
        "assert f(3) == [[3.0, 0.0], [0.0, 3.0]]",
    ]
    program = "import numpy as np\ndef f(x): return np.eye(2) @ np.eye(2) * np.float32(x)"
    assert (reward(built, program, tests), reward(built, "def f(x): return [[x]]", tests)) == (1.0, 0.0)
    built.close()


def test_a_set_up_counts_for_nothing(environment: CodeEnvironment) -> None:
    tests = ["import math", "LIMIT = 3", "assert f(LIMIT) == 4", "assert f(1) == 9"]
    assert reward(environment, "def f(x): return x + 1", tests) == 0.5


# The language of judge and program


def wire() -> Any:
    sys.path.insert(0, str(Path(nemorl_tasks.code.__file__).parent / "inside"))
    try:
        return __import__("wire")
    finally:
        sys.path.pop(0)


PLAIN = (bool, int, float, complex, str, bytes, bytearray, list, tuple, set, frozenset, dict, range, type(None))


def some(draw: random.Random, depth: int = 4, *, hashable: bool = False) -> Any:
    """Plain data at random."""
    kinds = ["none", "bool", "int", "big", "float", "str", "bytes", "complex", "range", "tuple", "frozenset"]
    kind = draw.choice(kinds[: 9 if depth == 0 else None] + ([] if hashable or depth == 0 else ["list", "set", "dict"]))
    many = [
        some(draw, depth - 1, hashable=hashable or kind in ("set", "frozenset"))
        for _ in range(draw.randrange(4) if depth else 0)
    ]
    simple = {
        "none": None,
        "bool": draw.random() < 0.5,
        "int": draw.randrange(-99, 99),
        "big": draw.randrange(1 << 200) - (1 << 199),
    }
    if kind in simple:
        return simple[kind]
    match kind:
        case "float":
            return draw.choice([draw.gauss(0, 1e9), 0.0, -0.0, float("inf"), 5e-324])
        case "str":
            return "".join(chr(draw.choice([65, 233, 0x1F600, 0xD800, 0, 34])) for _ in range(draw.randrange(5)))
        case "bytes":
            return draw.randbytes(draw.randrange(5))
        case "complex":
            return complex(draw.random(), -draw.random())
        case "range":
            return range(draw.randrange(9), draw.randrange(9), draw.choice([-2, 1, 3]))
        case "dict":
            return {some(draw, 1, hashable=True): item for item in many}
    return {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}[kind](many)


def exactly(value: Any) -> str:
    """Text that differs where types differ, deep inside."""
    if isinstance(value, set | frozenset):
        return f"{type(value)}{sorted(map(exactly, value))}"
    if isinstance(value, dict):
        return f"dict{[(exactly(k), exactly(v)) for k, v in value.items()]}"
    if isinstance(value, list | tuple):
        return f"{type(value)}{[exactly(item) for item in value]}"
    return f"{type(value)}{value!r}"


def no_other(*_: Any) -> Any:
    raise wire().ProtocolError


def test_plain_data_arrives_as_it_was() -> None:
    language, draw = wire(), random.Random(0)
    for _ in range(2000):
        value = some(draw)
        data = language.pack({"value": language.encode(value, no_other)})
        stream = iter([data[:4], data[4:]])
        assert exactly(language.decode(language.unpack(lambda _: next(stream))["value"], no_other)) == exactly(value)  # noqa: B023


def test_whatever_is_said_is_plain_data_or_an_error() -> None:
    language, draw = wire(), random.Random(1)
    words = [
        "list",
        "set",
        "dict",
        "int",
        "range",
        "complex",
        "bytes",
        "iterator",
        "object",
        "__class__",
        "0x",
        "7",
        1,
        -1,
        1.5,
        None,
        [],
        {},
    ]

    def junk(depth: int) -> Any:
        if depth == 0 or draw.random() < 0.3:
            return draw.choice(words)
        if draw.random() < 0.2:
            return {"value": junk(depth - 1)}
        return [draw.choice(words), junk(depth - 1)] if draw.random() < 0.6 else [junk(depth - 1) for _ in range(3)]

    outcomes = {"data": 0, "error": 0}
    for _ in range(5000):
        try:
            value = language.decode(json.loads(json.dumps(junk(4))), no_other)
        except language.ProtocolError:
            outcomes["error"] += 1
        else:
            outcomes["data"] += 1
            assert type(value) in PLAIN or type(value) is type(iter([]))
    assert min(outcomes.values()) > 500
