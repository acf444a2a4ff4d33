"""Verdicts kept on disk, shared by runs and processes."""

from __future__ import annotations

import sqlite3
import threading
from dataclasses import dataclass
from pathlib import Path

from nemorl.errors import UsageError

BUSY_S = 10.0
"""How long another process may hold the file."""


@dataclass(frozen=True)
class Verdict:
    """The judge's verdict on one response."""

    score: float
    reply: str


class VerdictCache:
    """A SQLite file of verdicts by key. Safe to use from many threads and processes."""

    def __init__(self, path: Path) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = sqlite3.connect(path, timeout=BUSY_S, check_same_thread=False, isolation_level=None)
            self._file.execute("PRAGMA synchronous = OFF")  # a lost verdict is asked for again
            self._file.execute("CREATE TABLE IF NOT EXISTS verdicts (key TEXT PRIMARY KEY, score REAL, reply TEXT)")
        except (sqlite3.Error, OSError) as error:
            raise UsageError(
                f"the judge's cache {path} cannot be used: {error}", fix="give environment.cache another path"
            ) from error
        self._lock = threading.Lock()

    def get(self, key: str) -> Verdict | None:
        with self._lock:
            found = self._file.execute("SELECT score, reply FROM verdicts WHERE key = ?", (key,)).fetchone()
        return None if found is None else Verdict(*found)

    def put(self, key: str, verdict: Verdict) -> None:
        row = (key, verdict.score, verdict.reply)
        with self._lock:
            self._file.execute("INSERT OR IGNORE INTO verdicts VALUES (?, ?, ?)", row)

    def close(self) -> None:
        with self._lock:
            self._file.close()
