"""A row's tests, tried before any program is judged by them: which of them count, and whether they can be passed.

Nothing of a policy takes part: tests run with decoys in the place of a program, and with the row's own solution. So
what is wrong with a row is told of the row, and a program can but fail.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from nemorl.errors import BackendError, DataError

from nemorl_tasks.code.cases import Pair, last_program, read_tests
from nemorl_tasks.code.sandbox import Limits, Result, Sandbox

PATIENCE = 3.0
"""Times what a program may take, for the row's own solution: a busy machine is not its fault."""
CONTROL = "print(6 * 7)"
"""A program that every working sandbox survives."""


@dataclass(frozen=True)
class Asserts:
    """Assert statements for the judge."""

    sources: tuple[str, ...]
    counts: tuple[bool, ...]
    """It checks something, and is no mere set-up."""
    objects: tuple[str, ...]
    """Names that may give objects, and not plain data only."""
    without: tuple[str, ...]
    """Built-in names that are the program's."""


@dataclass(frozen=True)
class Tests:
    """Of a row; of one kind."""

    pairs: tuple[Pair, ...]
    asserts: Asserts | None
    has_solution: bool
    """They are known to be passed by a program."""

    @property
    def total(self) -> int:
        """How many count."""
        return len(self.pairs) if self.asserts is None else sum(self.asserts.counts)


class RowTrials:
    """Tries rows in a sandbox."""

    def __init__(self, sandbox: Sandbox, limits: Limits) -> None:
        """
        Args:
            sandbox: That of programs.
            limits: Its limits.
        """
        self._sandbox = sandbox
        self._patient = sandbox.within(replace(limits, wall_s=PATIENCE * limits.wall_s))

    def tests(self, given: Any, solution: str | None, where: str) -> Tests:
        """
        Args:
            given: The row's tests.
            solution: The row's own program.
            where: The row, for errors.

        Raises:
            DataError: A test fails before it asks a program for anything, none checks what a program does, or the row's
                own solution does not pass them.
        """
        tests = read_tests(given, where)
        pairs = tuple(test for test in tests if isinstance(test, Pair))
        sources = tuple(test for test in tests if isinstance(test, str))
        found = Tests(pairs, self._tried(sources, where) if sources else None, solution is not None)
        if solution is not None:
            self._solve(found, solution, where)
        return found

    def _tried(self, sources: tuple[str, ...], where: str) -> Asserts:
        result = survived(self._sandbox, self._patient.try_tests(sources))
        ends: list[list[str]] = [[] for _ in sources]
        for number, verdict, *_ in result.verdicts:
            end, _, why = verdict.partition(" ")
            if end == "refused":
                raise _refusal(where, number, sources[number], why)
            ends[number].append(end)
        # What was not reached, since a test waits for an answer that no decoy gives, may check something.
        often = max(1, *map(len, ends))
        counts = tuple("checked" in found or "passed" not in found or len(found) < often for found in ends)
        if not any(counts):
            raise _refusal(where, len(sources) - 1, sources[-1], "no test checks what the program does")
        objects = {name for *_, names, _ in result.verdicts for name in names}
        without = {name for *_, names in result.verdicts for name in names}
        return Asserts(sources, counts, tuple(sorted(objects)), tuple(sorted(without)))

    def _solve(self, tests: Tests, solution: str, where: str) -> None:
        for number, pair in enumerate(tests.pairs):
            result = survived(self._sandbox, self._patient.run({"solution.py": solution}, ["solution.py"], pair.input))
            if not passes(result, pair):
                raise _unsolved(where, number, pair.input, shortfall(result, pair))
        if tests.asserts is None:
            return
        result = survived(self._sandbox, self._patient.judge(solution, tests.asserts))
        for number, source in enumerate(tests.asserts.sources):
            if number >= len(result.verdicts):
                raise _unsolved(where, number, source, _end(result))
            if result.verdicts[number] != "passed":
                raise _unsolved(where, number, source, result.verdicts[number].partition(" ")[2])


def shortfall(result: Result, pair: Pair) -> str:
    """What a program did that does not pass a test."""
    if result.returncode != 0:
        return _end(result)
    return f"it prints {result.stdout[-100:]!r} for {pair.output[:100]!r}"


def survived(sandbox: Sandbox, result: Result) -> Result:
    """The same, unless the sandbox died and so does one that a harmless program runs in.

    A program that brings its sandbox down scores nothing; where none can be run, a zero would teach the wrong lesson.

    Raises:
        BackendError: the sandbox, which is not closed, runs nothing.
    """
    if result.outcome == "broken" and not sandbox.is_closed:
        control = sandbox.run({"solution.py": CONTROL}, ["solution.py"])
        if (control.outcome, control.stdout) != ("done", "42\n"):
            raise BackendError(
                f"the code sandbox ({sandbox.mode}) runs no program, not even {CONTROL!r}: "
                f"{(control.stderr or result.stderr).strip()[-500:]}",
                fix="raise environment.memory_mib or max_processes, or check what the machine has left of both",
            )
    return result


def passes(result: Result, pair: Pair) -> bool:
    """The program ended well and printed what it should."""
    return result.outcome == "done" and result.returncode == 0 and pair.accepts(result.stdout)


def solution_of(row: Mapping[str, Any], column: str | None) -> str | None:
    """The row's own program, out of a code block where it stands in one; of several the first."""
    given = row.get(column) if column is not None else None
    if isinstance(given, list) and given:
        given = given[0]
    return (last_program(given) or given) if isinstance(given, str) and given.strip() else None


def _end(result: Result) -> str:
    return f"{result.outcome}, exit code {result.returncode}: {result.stderr.strip()[-300:]}"


def _refusal(where: str, number: int, test: str, why: str) -> DataError:
    return DataError(
        f"{where} test {number} cannot be judged: {why}: {test.strip()!r:.200}",
        fix="write tests as calls of the program's functions with plain data (numbers, strings, bytes, lists, tuples, "
        "dicts, sets, None) that compare what is returned, use input/output pairs, or drop the row",
    )


def _unsolved(where: str, number: int, test: str, why: str) -> DataError:
    return DataError(
        f"{where} the row's own solution does not pass test {number}, {test.strip()!r:.200}: {why}",
        fix="correct or drop the row, or set environment.solution_column to the right column, or to null for none",
    )
