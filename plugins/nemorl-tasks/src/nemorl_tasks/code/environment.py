"""The ``code`` environment: extracts the program, runs it in the sandbox, counts the tests that pass."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter, OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nemorl.contracts.environment import Environment
from nemorl.errors import UsageError
from nemorl.types import Prompt, Score

from nemorl_tasks.code.cases import last_program
from nemorl_tasks.code.probe import best_sandbox
from nemorl_tasks.code.rows import RowTrials, Tests, passes, shortfall, solution_of, survived
from nemorl_tasks.code.sandbox import Limits, Result, Sandbox

if TYPE_CHECKING:
    from nemorl_rl.agents.contract import EpisodePolicy

    from nemorl_tasks.code.config import CodeConfig

EVENTS = ("code_missing", "code_timeout", "code_output_limit", "code_error", "code_tampered", "code_sandbox_died")
"""Metrics, each 1 when it happened to a response at all: no program; stopped; ended with an error; spoke to its judge
out of turn; its sandbox ended although others do not."""
UNPROVEN = "code_unproven"
"""1 where the row has no solution, and a test of it that no program of this run has passed."""
MAX_ROWS = 16384
"""Tried rows that are remembered."""


@dataclass
class _Row:
    """A row's tests, and those of them that some program has passed."""

    tests: Tests
    proven: set[int] = field(default_factory=set)

    @property
    def is_proven(self) -> bool:
        return self.tests.has_solution or len(self.proven) == self.tests.total


@dataclass
class _Tally:
    """The results of one response's tests."""

    passed: set[int] = field(default_factory=set)
    """Of the tests that count."""
    events: Counter[str] = field(default_factory=Counter)
    feedback: str = ""
    """On the first test that failed"""

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
    policy_can_stall = True

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
        self._trials = RowTrials(self.sandbox, limits)
        self._workers = ThreadPoolExecutor(config.workers, thread_name_prefix="environment-code")
        self._lock = threading.Lock()
        self._rows: OrderedDict[str, Future[_Row]] = OrderedDict()

    async def try_out(self, prompt: Prompt, policy: EpisodePolicy) -> None:
        """The first row, before the model is loaded. The others are tried as they come."""
        await self._tried(prompt)

    async def score(self, prompt: Prompt, response: str) -> Score:  # type: ignore[override]
        if self.sandbox.is_closed:
            raise UsageError("the code environment is closed", fix="build a new one from its config")
        row = await self._tried(prompt)
        program, tally = last_program(response), _Tally()
        if program is None:
            tally.events["code_missing"] = 1
        else:
            await asyncio.wrap_future(self._workers.submit(self._judge, program, row.tests, tally))
            row.proven |= tally.passed
        return self._score(row, tally)

    def close(self) -> None:
        """Begin nothing more. What runs ends by its own limits."""
        self.sandbox.close()
        self._workers.shutdown(wait=False, cancel_futures=True)

    async def _tried(self, prompt: Prompt) -> _Row:
        """The row. Others wait for the same trial, also where this one is given up."""
        return await asyncio.shield(asyncio.wrap_future(self._row(prompt)))

    def _row(self, prompt: Prompt) -> Future[_Row]:
        """The row, tried when it is first met."""
        column = self._config.tests_column
        given, solution = prompt.row.get(column), solution_of(prompt.row, self._config.solution_column)
        where = f"prompt {prompt.text[:60]!r}, column {column!r},"
        key = json.dumps([given, solution], default=str)
        with self._lock:
            if key not in self._rows:
                self._rows[key] = self._workers.submit(lambda: _Row(self._trials.tests(given, solution, where)))
            self._rows.move_to_end(key)
            if len(self._rows) > MAX_ROWS:
                self._rows.popitem(last=False)
            return self._rows[key]

    def _judge(self, program: str, tests: Tests, tally: _Tally) -> None:
        if tests.asserts is not None:
            result = survived(self.sandbox, self.sandbox.judge(program, tests.asserts))
            tally.note(result)
            counted = [n for n, counts in enumerate(tests.asserts.counts) if counts]
            verdicts = dict(enumerate(result.verdicts))
            tally.passed |= {number for number in counted if verdicts.get(number) == "passed"}
            if missed := [number for number in counted if number not in tally.passed]:
                why = verdicts.get(missed[0], "").partition(" ")[2]
                tally.feedback = f"{tests.asserts.sources[missed[0]]} fails{f': {why}' if why else ''}"
        for number, pair in enumerate(tests.pairs):
            if self.sandbox.is_closed or (len(tally.passed) < number and self._config.all_or_nothing):
                break  # nobody wants to know, or one failure decides
            result = survived(self.sandbox, self.sandbox.run({"solution.py": program}, ["solution.py"], pair.input))
            tally.note(result)
            if passes(result, pair):
                tally.passed.add(number)
            elif not tally.feedback:
                tally.feedback = f"given {pair.input[:100]!r}, {shortfall(result, pair)}"

    def _score(self, row: _Row, tally: _Tally) -> Score:
        share = len(tally.passed) / row.tests.total
        correct = len(tally.passed) == row.tests.total
        metrics = {name: float(tally.events[name]) for name in EVENTS}
        reward = float(correct) if self._config.all_or_nothing else share
        metrics |= {UNPROVEN: float(not row.is_proven), "tests_passed": share}
        return Score(reward, metrics=metrics, correct=correct, feedback=tally.feedback)
