"""Loggers with a mistake each."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from nemorl.plugins.kinds import LoggerConfig


class AnyLogger(LoggerConfig):
    """``mistake`` chooses what is wrong."""

    summary: ClassVar[str] = "a logger with a mistake"
    mistake: str = ""
    """What is wrong."""

    def build(self, run_dir: Path) -> Any:
        if self.mistake == "none: a database":
            return TableLogger(run_dir / "log.db")
        return FileLogger(run_dir / "log.txt", self.mistake)


class FileLogger:
    """One line per record."""

    def __init__(self, path: Path, mistake: str) -> None:
        self.mistake, self.last = mistake, -1
        self.file = path.open("w" if mistake == "truncates" else "a")

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        if self.mistake == "integers":
            metrics = {name: int(value * 1000) for name, value in metrics.items()}
        if self.mistake == "one record per step" and step <= self.last:
            raise ValueError(f"step {step} after step {self.last}")
        self.last = step
        if self.mistake != "every fourth step" or step % 4 == 0:
            self.file.write(f"{step} {dict(metrics)}\n")

    def close(self) -> None:
        if self.mistake == "closes once" and self.file.closed:
            raise ValueError("closed")
        self.file.close()


class TableLogger:
    """Rows of a database, whose file grows by pages of 64 KiB."""

    def __init__(self, path: Path) -> None:
        self.database = sqlite3.connect(path)
        self.database.execute("PRAGMA page_size = 65536")
        self.database.execute("CREATE TABLE IF NOT EXISTS metrics (step INTEGER, name TEXT, value REAL)")

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        rows = [(step, name, str(value)) for name, value in metrics.items()]
        self.database.executemany("INSERT INTO metrics VALUES (?, ?, ?)", rows)
        self.database.commit()

    def close(self) -> None:
        self.database.close()
