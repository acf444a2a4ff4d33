"""Samples for the tables of a service: some of each step that the run's records hold, once each."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from nemorl_cli.report.records.reading import FOLDER, read_records, record_files

COLUMNS = ("step", "split", "prompt", "response", "answer", "reward", "advantage", "tokens", "finish_reason")
"""Of a table, by their names in the records."""
Cell = str | float | int | None


class SampleTable(NamedTuple):
    """Samples of one step and split."""

    split: str
    step: int
    rows: list[list[Cell]]
    """By ``COLUMNS``."""


class NewSamples:
    """The samples that were recorded since somebody asked. Those of before a resume were sent then."""

    def __init__(self, run_dir: Path, count: int) -> None:
        """
        Args:
            run_dir: Of the run.
            count: Samples of each step and split; 0: none.
        """
        self._run_dir, self._count = run_dir, count
        self._seen = set(record_files(run_dir / FOLDER)) if count else set()

    def take(self) -> Iterator[SampleTable]:
        """A table of each step that was recorded since the last call, spread over its groups."""
        for file in record_files(self._run_dir / FOLDER) if self._count else ():
            if file not in self._seen:
                self._seen.add(file)
                found = list(read_records(self._run_dir, split=file.split, step=file.step, columns=COLUMNS))
                count = min(self._count, len(found))
                some = (found[place * len(found) // count] for place in range(count))
                yield SampleTable(file.split, file.step, [[row[name] for name in COLUMNS] for row in some])
