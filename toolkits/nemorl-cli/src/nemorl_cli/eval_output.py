"""Where ``nemorl eval`` writes while it runs: progress on stderr, samples in a file."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from nemorl.base.files.jsonl import JsonlWriter
from nemorl.errors import UsageError
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from nemorl_cli.terminal import PlainConsole, console, plain

if TYPE_CHECKING:
    from nemorl.types import Sample

PLAIN_INTERVAL_S = 2.0
"""Without a terminal, at most one line of progress per this many seconds."""

LINES = (".jsonl", ".json")
FIX_OUTPUT = "give a file that ends in .jsonl, or a folder for records, which `nemorl view samples` shows"


class Display:
    """Progress on stderr: a bar on a terminal, a line now and then elsewhere."""

    def __init__(self, console: PlainConsole, *, quiet: bool) -> None:
        self._console, self._quiet = console, quiet
        columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn())
        is_live = console.is_terminal and not quiet
        self.bar = Progress(*columns, TimeElapsedColumn(), console=console, transient=True) if is_live else None
        self._name, self._total, self._done, self._said_at = "", 0, 0, 0.0

    def begin(self, name: str, total: int | None, unit: str = "prompts") -> None:
        self._name, self._total, self._done, self._said_at = name, total or 0, 0, time.monotonic()
        if self.bar is not None:
            for task in self.bar.task_ids:
                self.bar.remove_task(task)
            self.bar.add_task(plain(name), total=total)
        else:
            self.say(f"{name}: {total} {unit}" if total else name)

    def advance(self) -> None:
        self._done += 1
        if self.bar is not None:
            self.bar.advance(self.bar.task_ids[0])
        elif time.monotonic() - self._said_at >= PLAIN_INTERVAL_S:
            self.say(f"{self._name}: {self._done}/{self._total}")
            self._said_at = time.monotonic()

    def say(self, text: str) -> None:
        if not self._quiet:
            self._console.print(text, soft_wrap=True)


@contextmanager
def open_display(*, quiet: bool) -> Iterator[Display]:
    display = Display(console(err=True), quiet=quiet)
    with display.bar or nullcontext():
        yield display


class SampleOutput(Protocol):
    """Where responses go."""

    def add(self, dataset: str, seed: int, group: Sequence[Sample]) -> None:
        """A scored group of a dataset."""


class _Nowhere:
    def add(self, dataset: str, seed: int, group: Sequence[Sample]) -> None: ...


class _Lines:
    def __init__(self, writer: JsonlWriter) -> None:
        self._writer = writer

    def add(self, dataset: str, seed: int, group: Sequence[Sample]) -> None:
        from nemorl_rl.evaluation.evaluation import eval_record

        for sample in group:
            self._writer.write(eval_record(sample, dataset, seed))


def refuse_unknown_form(path: Path | None) -> None:
    """
    Raises:
        UsageError: responses cannot be written as the suffix says.
    """
    if path is not None and path.suffix not in ("", *LINES):
        raise UsageError(f"--output {path}: responses are written as lines or as records", fix=FIX_OUTPUT)


@contextmanager
def open_samples(path: Path | None, decode: Callable[[Sequence[int]], str]) -> Iterator[SampleOutput]:
    """Where responses go: a fresh file of lines, or a folder of records; samples of two evaluations in one could not be
    told apart.

    Args:
        path: ``.jsonl`` or ``.json``: a file. Without a suffix: a folder. Unset: nowhere.
        decode: Token ids to text.
    """
    if path is None:
        yield _Nowhere()
    elif path.suffix in LINES:
        path.unlink(missing_ok=True)
        with JsonlWriter(path) as writer:
            yield _Lines(writer)
    else:
        from nemorl_cli.report.records.evaluating import EvaluationRecords

        records = EvaluationRecords(path, decode)
        try:
            yield records
        finally:
            records.flush()
