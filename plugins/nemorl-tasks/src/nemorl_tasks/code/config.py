"""The options of the ``code`` environment. Nothing heavy is imported here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, ClassVar

from nemorl.config import RESUMABLE, Interpreter
from nemorl.metrics import MetricInfo
from nemorl.plugins.kinds import EnvironmentConfig
from pydantic import Field

if TYPE_CHECKING:
    from nemorl.contracts import Environment


class CodeConfig(EnvironmentConfig):
    """Runs the last fenced code block of a response against the row's tests, in a sandbox. Linux."""

    summary: ClassVar[str] = "runs Python code against tests, in a sandbox without network and files"
    metrics: ClassVar[Mapping[str, MetricInfo]] = {
        "train/environment/tests_passed": MetricInfo(
            "Tests passed",
            "share",
            "share of a row's tests that a program passes",
            "growth while accuracy stays: some tests are met by a constant",
            smooth=True,
        ),
        **{
            f"train/environment/code_{event}": MetricInfo(
                "Programs that failed", "share", f"share of responses {words}", watch_for
            )
            for event, words, watch_for in (
                ("missing", "without a program", "no fall in the first steps: show the expected form in the prompt"),
                ("timeout", "whose program was stopped at the time limit", "growth: raise `timeout_s`"),
                ("output_limit", "whose program wrote more than `output_kib`", ""),
                ("error", "whose program ended with an error", ""),
                ("tampered", "whose program spoke to its judge out of turn", "growth: the policy attacks its judge"),
                ("sandbox_died", "whose sandbox ended although others do not", "anything above 0 that stays"),
                (
                    "unproven",
                    "to rows with a test that no program of this run has passed, and no solution to try it with",
                    "no fall: such tests may be impossible to pass; give rows a `solution`",
                ),
            )
        },
    }

    tests_column: str = "tests"
    """Column with the tests: ``{"input": …, "output": …}`` pairs (the program reads and prints), or assert statements
    (the program defines what they call; they run elsewhere and see plain data only), or either as JSON text."""
    solution_column: str | None = "solution"
    """Column with a program that passes the tests, where rows have one. It is run once, before any response: a row
    whose own solution fails is an error. ``null``: never."""
    all_or_nothing: bool = False
    """Reward 1 when all tests pass, else 0. Unset: the share of tests that pass. All or nothing is harder to exploit
    by programs that print the most frequent answer."""
    timeout_s: float = Field(5.0, gt=0, le=600)
    """Seconds, of the clock and of the CPU, that one run may take: a pair of input and output, or all assert statements
    together."""
    memory_mib: int = Field(512, ge=64, le=2**30)
    """Memory of one process in MiB. What it may use in all is this times ``max_processes``."""
    max_processes: int = Field(16, ge=2, le=256)
    """Processes and threads of one program."""
    output_kib: int = Field(256, ge=1, le=2**20)
    """Output in KiB before a program is stopped."""
    disk_mib: int = Field(16, ge=1, le=2**20)
    """Most that a program may write into its folder, in MiB. It is memory, and gone afterwards."""
    workers: Annotated[int, RESUMABLE] = Field(4, ge=1, le=256)
    """Programs that run at the same time, each on a core of its own at best. With fewer than
    ``rollouts.environment_concurrency``, responses wait for one another within ``environment_timeout_s``."""
    python: Interpreter | None = None
    """``bin/python`` (3.10 or newer) of the environment that programs and tests run in, to give them packages. Unset:
    this interpreter, with the standard library only."""
    allow_weaker_sandbox: bool = False
    """Go on with the best that a machine permits where it cannot isolate programs fully. Then they may reach your
    files or the network: only where there is nothing of value to reach."""

    def build(self) -> Environment:
        from nemorl_tasks.code.environment import CodeEnvironment

        return CodeEnvironment(self)
