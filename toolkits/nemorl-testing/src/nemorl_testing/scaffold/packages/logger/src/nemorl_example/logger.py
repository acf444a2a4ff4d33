"""Writes the file."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path


class ExampleLogger:
    """One line per metric and step: steps differ in what they measure, so there is no fixed set of columns.

    A resumed run appends; a step that is done again after a crash then appears twice, the later line being the valid
    one.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        is_new = not path.exists()
        self._file = path.open("a", newline="", encoding="utf-8")
        self._writer = csv.writer(self._file)
        if is_new:
            self._writer.writerow(["step", "name", "value"])

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._writer.writerows([step, name, value] for name, value in metrics.items())
        self._file.flush()  # somebody may be watching, and a run may be killed

    def close(self) -> None:
        self._file.close()
