"""The ``code`` environment: extracts the program, runs it in the sandbox, counts the tests that pass."""

from __future__ import annotations

import asyncio
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nemorl.environment import Environment
from nemorl.errors import BackendError, DataError, UsageError
from nemorl.types import Prompt, Score

from nemorl_code_env.asserts import Test, analyze
from nemorl_code_env.cases import Pair, last_program, read_tests
from nemorl_code_env.probe import best_sandbox
from nemorl_code_env.sandbox import Limits, Result, Sandbox

if TYPE_CHECKING:
    from nemorl_code_env.config import CodeConfig

EVENTS = ("code_missing", "code_timeout", "code_output_limit", "code_error", "code_tampered", "code_sandbox_died")
"""Metrics, each 1 when it happened to a response at all: no program; stopped; ended with an error; spoke to its judge
out of turn; its sandbox ended although others do not."""
CONTROL = "print(6 * 7)"
"""A program that every working sandbox survives."""


@dataclass
class _Tally:
    """What became of one response's tests."""

    total: int
    passed: int = 0
    events: Counter[str] = field(default_factory=Counter)

    def note(self, result: Result) -> None:
        if result.outcome == "broken":
            self.events["code_sandbox_died"] = 1
        elif result.tampered:
            self.events["code_tampered"] = 1
        elif result.outcome == "timeout":
            self.events["code_timeout"] = 1
        elif result.outcome == "output":
            self.events["code_output_limit"] = 1
        elif result.returncode != 0:
            self.events["code_error"] = 1


class CodeEnvironment(Environment):
    """Async: ``workers`` threads wait for that many programs at most, however many responses wait for them."""

    name = "code"

    def __init__(self, config: CodeConfig) -> None:
        limits = Limits(
            wall_s=config.timeout_s,
            memory_mib=config.memory_mib,
            processes=config.max_processes,
            output_kib=config.output_kib,
            disk_mib=config.disk_mib,
        )
        python = None if config.python is None else str(config.python)
        self._config = config
        self.sandbox: Sandbox = best_sandbox(limits, python, allow_weaker=config.allow_weaker_sandbox)
        self._workers = ThreadPoolExecutor(config.workers, thread_name_prefix="environment-code")
        self._closed = False

    async def score(self, prompt: Prompt, response: str) -> Score:  # type: ignore[override]
        column = self._config.tests_column
        where = f"prompt {prompt.text[:60]!r}, column {column!r},"
        pairs, asserts = _split(read_tests(prompt.row.get(column), where), where)
        total = len(pairs) + sum(test.counts for test in asserts)
        program = last_program(response)
        if program is None:
            return self._score(_Tally(total, events=Counter(code_missing=1)))
        if self._closed:
            raise UsageError("the code environment is closed", fix="build a new one from its config")
        tally = _Tally(total)
        await asyncio.wrap_future(self._workers.submit(self._judge, program, pairs, asserts, where, tally))
        return self._score(tally)

    def close(self) -> None:
        """Begin nothing more. What runs ends by its own limits."""
        self._closed = True
        self._workers.shutdown(wait=False, cancel_futures=True)
        self.sandbox.close()

    def _judge(self, program: str, pairs: list[Pair], asserts: tuple[Test, ...], where: str, tally: _Tally) -> None:
        if asserts:
            self._run_asserts(program, asserts, where, tally)
        for pair in pairs:
            if self._closed or (not self._run_pair(program, pair, tally) and self._config.all_or_nothing):
                break  # nobody wants to know, or one failure decides

    def _run_pair(self, program: str, test: Pair, tally: _Tally) -> bool:
        result = self._survived(self.sandbox.run({"solution.py": program}, ["solution.py"], test.input))
        tally.note(result)
        is_right = result.outcome == "done" and result.returncode == 0 and test.accepts(result.stdout)
        tally.passed += is_right
        return is_right

    def _run_asserts(self, program: str, tests: tuple[Test, ...], where: str, tally: _Tally) -> None:
        result = self._survived(self.sandbox.judge(program, tests))
        tally.note(result)
        for test, verdict in zip(tests, result.verdicts, strict=False):
            if verdict.startswith("refused "):
                raise DataError(
                    f"{where} a test cannot be judged: {verdict.removeprefix('refused ')}: {test.source!r:.200}",
                    fix="pass plain data (numbers, strings, bytes, lists, tuples, dicts, sets, None) to the program's "
                    "functions, and test nothing that the sandbox lacks",
                )
            tally.passed += test.counts and verdict == "passed"

    def _survived(self, result: Result) -> Result:
        """The same, unless the sandbox died and so does one that a harmless program runs in.

        A program that brings its sandbox down scores nothing; where none can be run, a zero would teach the wrong
        lesson.
        """
        if result.outcome == "broken" and not self._closed:
            control = self.sandbox.run({"solution.py": CONTROL}, ["solution.py"])
            if (control.outcome, control.stdout) != ("done", "42\n"):
                raise BackendError(
                    f"the code sandbox ({self.sandbox.mode}) runs no program, not even {CONTROL!r}: "
                    f"{(control.stderr or result.stderr).strip()[-500:]}",
                    fix="raise environment.memory_mib or max_processes, or check what the machine has left of both",
                )
        return result

    def _score(self, tally: _Tally) -> Score:
        share = tally.passed / tally.total
        correct = tally.passed == tally.total
        metrics = {name: float(tally.events[name]) for name in EVENTS}
        reward = float(correct) if self._config.all_or_nothing else share
        return Score(reward, metrics={**metrics, "tests_passed": share}, correct=correct)


def _split(tests: list[Pair] | list[str], where: str) -> tuple[list[Pair], tuple[Test, ...]]:
    """A row has tests of one kind."""
    asserts = tuple(test for test in tests if isinstance(test, str))
    return [test for test in tests if isinstance(test, Pair)], analyze(asserts, where) if asserts else ()
