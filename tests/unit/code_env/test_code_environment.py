"""Programs out of responses, tests out of rows, scores out of both."""

from __future__ import annotations

import json
from typing import Any

import pytest
from nemorl.errors import DataError, PluginError, UsageError
from nemorl.types import Prompt, Score
from nemorl_rl.environments import EnvironmentPool
from nemorl_tasks.code import CodeConfig
from nemorl_tasks.code.cases import Pair, last_program, read_tests
from nemorl_tasks.code.environment import CodeEnvironment
from recorded_messages import Raises

ASSERTS = ["assert add(1, 2) == 3", "assert add(0, 0) == 0", "assert add(-1, 1) == 0", "assert add('a', 'b') == 'ab'"]
PAIRS = [{"input": "1 2\n", "output": "3\n"}, {"input": "5 5\n", "output": "10"}]


@pytest.fixture(scope="module")
def share() -> Any:
    return built()


@pytest.fixture(scope="module")
def brief() -> Any:
    """For programs that do not end by themselves."""
    return built(timeout_s=0.7)


@pytest.fixture(scope="module")
def all_or_nothing() -> Any:
    return built(all_or_nothing=True)


def built(**options: Any) -> CodeEnvironment:
    try:
        return CodeEnvironment(CodeConfig(**{"timeout_s": 20.0, "memory_mib": 256, **options}))
    except PluginError as error:
        pytest.skip(f"this machine cannot isolate programs: {error.message}")


def code(text: str) -> str:
    return f"Here it is:\n```python\n{text}\n```\nDone."


def score(environment: CodeEnvironment, tests: Any, *responses: str) -> list[Score]:
    pool = EnvironmentPool(environment, timeout_s=60)
    prompt = Prompt(0, "Add.", (1,), row={"tests": tests})
    return [step.score for step in pool.step([pool.start(prompt) for _ in responses], responses)]


def happened(found: Score) -> set[str]:
    return {name for name, value in found.metrics.items() if value and name not in ("tests_passed", "code_unproven")}


def test_the_reward_is_the_share_of_assert_statements_that_hold(share: CodeEnvironment) -> None:
    right, half, wrong = score(
        share,
        ASSERTS,
        code("def add(a, b): return a + b"),
        code("def add(a, b): return a + b if isinstance(a, int) and a > 0 else 0"),
        code("def add(a, b): return 7"),
    )
    assert [s.reward for s in (right, half, wrong)] == [1.0, 0.75, 0.0]
    assert [s.correct for s in (right, half, wrong)] == [True, False, False]
    assert half.metrics["tests_passed"] == 0.75
    assert happened(half) == set()


def test_pairs_are_one_run_each(share: CodeEnvironment) -> None:
    right, constant = score(
        share, PAIRS, code("print(sum(map(int, input().split())))"), code("a, b = map(int, input().split())\nprint(3)")
    )
    assert (right.reward, constant.reward) == (1.0, 0.5)


def test_all_or_nothing(all_or_nothing: CodeEnvironment) -> None:
    right, constant = score(
        all_or_nothing, PAIRS, code("print(sum(map(int, input().split())))"), code("input()\nprint(3)")
    )
    assert (right.reward, constant.reward) == (1.0, 0.0)


@pytest.mark.parametrize(
    ("program", "event"),
    [
        ("while True: pass", "code_timeout"),
        ("import time; time.sleep(60)", "code_timeout"),
        ("1/0", "code_error"),
        ("data = []\nwhile True: data.append(bytearray(1 << 24))", "code_error"),
        ("def add(a, b:", "code_error"),
    ],
)
def test_what_goes_wrong_is_counted(share: CodeEnvironment, brief: CodeEnvironment, program: str, event: str) -> None:
    (only,) = score(brief if event == "code_timeout" else share, ASSERTS[:1], code(program))
    assert (only.reward, happened(only)) == (0.0, {event})


def test_output_without_end_is_counted_and_no_program_at_all_too(share: CodeEnvironment) -> None:
    loud, none = score(share, PAIRS, code("while True: print('3')"), "3")
    assert (loud.reward, happened(loud)) == (0.0, {"code_output_limit"})
    assert (none.reward, happened(none)) == (0.0, {"code_missing"})


def test_a_program_that_ends_early_passes_no_assert_statement(share: CodeEnvironment) -> None:
    cheats = ["import os; os._exit(0)", "import sys; sys.exit(0)", "raise SystemExit", "quit()", "exit()"]
    assert [s.reward for s in score(share, ASSERTS, *map(code, cheats))] == [0.0] * len(cheats)


def test_a_program_that_prints_verdicts_passes_no_assert_statement(share: CodeEnvironment) -> None:
    program = """
import os
for fd in range(10):
    for number in range(4):
        try: os.write(fd, b'ok %d\\n' % number)
        except OSError: pass
"""
    assert score(share, ASSERTS, code(program))[0].reward == 0.0


def test_tests_use_objects_of_the_program_and_names_of_tests_before_them(share: CodeEnvironment) -> None:
    program = "from dataclasses import dataclass\n@dataclass\nclass Point:\n    x: 'int'\n_hidden = 3"
    tests = ["p = Point(2)\nassert p.x == 2", "assert p.x == _hidden - 1", "assert missing", "assert p.x + 1 == 3"]
    assert score(share, tests, code(program))[0].reward == 0.75


def test_a_hanging_test_does_not_take_those_before_it() -> None:
    patient = built(timeout_s=4.0)  # those before it end in it, also on a loaded machine
    (only,) = score(patient, ASSERTS, code("def add(a, b):\n    while a == 0: pass\n    return a + b"))
    assert (only.reward, happened(only)) == (0.25, {"code_timeout"})


def test_a_program_that_outlasts_the_patience_of_a_run_is_the_doing_of_the_policy() -> None:
    patient = built(timeout_s=4.0)
    pool = EnvironmentPool(patient, timeout_s=0.5)
    episode = pool.start(Prompt(0, "Add.", (1,), row={"tests": PAIRS}))
    (step,) = pool.step([episode], [code("import time; time.sleep(9)")])
    assert (step.score.outcome, step.score.valid) == ("policy_timeout", True)


def test_many_responses_are_judged_with_few_workers() -> None:
    environment = built(workers=2)
    responses = [code(f"print({number})") for number in range(12)]
    tests = [{"input": "", "output": "5"}]
    assert [s.reward for s in score(environment, tests, *responses)] == [float(n == 5) for n in range(12)]
    environment.close()


def test_a_closed_environment_says_so(raises: Raises) -> None:
    environment = built()
    environment.close()
    with raises(UsageError):
        score(environment, ASSERTS, code("x"))


@pytest.mark.parametrize(
    ("response", "program"),
    [
        ("```python\nx = 1\n```", "x = 1\n"),
        ("```py\na\n```\ntext\n```\nb\n```", "b\n"),
        ("```python\na\n```\n```bash\nls\n```", "a\n"),
        ("```python title=x\na\n```", "a\n"),
        ("  ```python\n  a\n    b\n c\n  ```", "a\n  b\nc\n"),
        ("```python\nx = 1", "x = 1\n"),
        ("```python\nx = 1\n```\n```", "x = 1\n"),
        ("~~~python\nx = 1\n~~~", "x = 1\n"),
        ("~~~\nx = 1\n```\n~~~~ ", "x = 1\n```\n"),
        ('````python\nx = """\n```\n"""\n````\nThat is it.', 'x = """\n```\n"""\n'),
        ("```python\na\n~~~\n```", "a\n~~~\n"),
        ("```python\r\na\r\n```\r\nb", "a\r\n"),
        ("```bash\nls", None),
        ("~~~~~ ~~ ~", None),
        ("a ``` b\n```", None),
        ("x = 1", None),
        ("", None),
        ("```" * 5000, None),
    ],
)
def test_the_last_python_block_is_the_program(response: str, program: str | None) -> None:
    assert last_program(response) == program


@pytest.mark.parametrize(
    ("given", "tests"),
    [
        (PAIRS, [Pair("1 2\n", "3\n"), Pair("5 5\n", "10")]),
        ({"inputs": ["1"], "outputs": [2]}, [Pair("1", "2")]),
        ({"inputs": [["1", "2"]], "outputs": [["3"]]}, [Pair("1\n2", "3")]),
        (ASSERTS, ASSERTS),
        (json.dumps(ASSERTS), ASSERTS),
        (json.dumps(PAIRS), [Pair("1 2\n", "3\n"), Pair("5 5\n", "10")]),
        ("assert True", ["assert True"]),
        (json.dumps("assert True"), ["assert True"]),
    ],
)
def test_tests_come_in_the_forms_that_datasets_have(given: Any, tests: Any) -> None:
    assert read_tests(given, "row") == tests


@pytest.mark.parametrize(
    "given",
    [
        *(None, [], "", {}, [1], "[]", [{"input": "1"}]),
        *({"inputs": ["1"], "outputs": []}, {"inputs": "12", "outputs": "34"}, {"inputs": 1, "outputs": 1}),
    ],
)
def test_rows_without_tests_are_an_error(given: Any, raises: Raises) -> None:
    with raises(DataError):
        read_tests(given, "row")


def test_output_is_compared_by_line_without_spaces_at_ends() -> None:
    assert Pair("", "1\n2\n").accepts("1 \n2\n\n")
    assert not Pair("", "1\n2\n").accepts("1 2")
    assert not Pair("", "1").accepts(" 1")


def test_the_first_test_that_fails_is_told(share: Any) -> None:
    right, wrong = code("def add(a, b): return a + b"), code("def add(a, b): return abs(a) + abs(b)")
    told = [one.feedback for one in score(share, ASSERTS[:3], right, wrong)]
    assert told[0] == ""
    assert told[1].startswith(f"{ASSERTS[2]} fails")
    twice = code("a, b = map(int, input().split()); print(a + b if a == 5 else 7)")
    (found,) = score(share, PAIRS, twice)
    assert found.feedback == "given '1 2\\n', it prints '7\\n' for '3\\n'"
    (broken,) = score(share, PAIRS, code("1/0"))
    assert "ZeroDivisionError" in broken.feedback
