"""Contents of a run directory that go to a remote service: samples for its tables, the config, and the id of the remote
run, so that a resumed run continues it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from nemorl.base.files.atomic import loading, replace_text
from nemorl.base.text.yaml_text import parse_yaml
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


def saved_id(run_dir: Path, service: str) -> str | None:
    """The id stored by :func:`save_id`, or None in a fresh run directory."""
    return _text(_path(run_dir, service)).strip() or None


def save_id(run_dir: Path, service: str, run_id: str) -> None:
    """Remember the id for the next time."""
    run_dir.mkdir(parents=True, exist_ok=True)
    replace_text(_path(run_dir, service), run_id + "\n")


def recorded_config(run_dir: Path) -> dict[str, Any]:
    """The resolved config of the run; empty before it is written."""
    return parse_yaml(_text(run_dir / "config.yaml")) or {}


def _text(path: Path) -> str:
    """Of a file; empty where there is none."""
    with loading(path):
        return path.read_text(encoding="utf-8") if path.is_file() else ""


def _path(run_dir: Path, service: str) -> Path:
    return run_dir / f"{service}-run-id"
