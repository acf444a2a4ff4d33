"""Reading of what a run adds to its directory while it is watched."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nemorl.base.files.atomic import loading
from nemorl.base.files.jsonl import parse_line
from nemorl.base.files.ownership import FILE, Owner

from nemorl_cli.report.records.reading import FOLDER, RecordFile, read_records, record_files
from nemorl_cli.report.run_data import RunData

MOST_BYTES = 1 << 20
"""Read at once of a file that is followed."""


def lines_after(path: Path, offset: int) -> tuple[list[dict[str, Any]], int]:
    """Objects of a JSON lines file beyond an offset, piece by piece: (objects of whole lines, the offset after them).

    A file that is shorter by now was cut: there are no objects, and the offset is its end. One that is gone is empty.

    Raises:
        StorageError: The system refuses to give it.

    Example:
        >>> lines_after(Path("no/such/file"), 7)
        ([], 0)
    """
    if not Path(path).is_file():
        return [], 0
    with loading(path), Path(path).open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        if size < offset:
            return [], size
        file.seek(offset)
        data = file.read(MOST_BYTES)
        while b"\n" not in data and (more := file.read(MOST_BYTES)):
            data += more
    whole = data[: data.rfind(b"\n") + 1]
    return [record for line in whole.split(b"\n") if (record := parse_line(line)) is not None], offset + len(whole)


class Tail:
    """The lines that are added to a file of JSON lines."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0

    def read(self) -> Iterator[dict[str, Any]]:
        """Objects since the last call. Of a file that was cut, what is written after that."""
        while True:
            found, after = lines_after(self._path, self._offset)
            if after == self._offset:
                return
            self._offset = after
            yield from found


class Following:
    """A run as seen from outside."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self.metrics, self._events = Tail(run_dir / "metrics.jsonl"), Tail(run_dir / "events.jsonl")
        self._told: list[dict[str, Any]] = []
        self._seen = set(record_files(run_dir / FOLDER)[:-1])  # the newest step is shown

    def events(self) -> list[dict[str, Any]]:
        """Events since the last call."""
        found = list(self._events.read())
        self._told += found
        return found

    def samples(self, count: int) -> Iterator[dict[str, Any]]:
        """Some samples of each step recorded since the last call, of different groups where possible."""
        for file in record_files(self._run_dir / FOLDER):
            if file not in self._seen and count:
                self._seen.add(file)
                yield from self._of(file, count)

    def _of(self, file: RecordFile, count: int) -> Iterator[dict[str, Any]]:
        found = list(read_records(self._run_dir, split=file.split, step=file.step))
        yield from (found[place * len(found) // count] for place in range(min(count, len(found))))

    @property
    def status(self) -> str:
        """As :attr:`RunData.status` has it, by the events so far; ``lost`` where its process ended without a word."""
        found = RunData(self._run_dir.name, events=tuple(self._told)).status
        is_gone = was_killed(self._run_dir) or not (self._run_dir / FILE).exists()
        return "lost" if found == "incomplete" and is_gone else found


def was_killed(run_dir: Path) -> bool:
    """The process that has a run has ended, and did not give it up. False where that cannot be known from here."""
    try:
        owner = Owner.read((run_dir / FILE).read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return False
    return owner is not None and owner.is_gone
