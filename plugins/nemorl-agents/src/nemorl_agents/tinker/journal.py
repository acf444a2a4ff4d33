"""Journal: the SQLite file that a killed server comes back with, and the tables in it.

A write is on the disk when its block ends (WAL, ``synchronous = FULL``). Whoever reads does so on a connection of its
own and never waits for a disk.
"""

from __future__ import annotations

import fcntl
import json
import sqlite3
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, fields, replace
from pathlib import Path
from typing import IO, Any, Generic, TypeVar, get_type_hints

from nemorl.base.files.atomic import storing
from nemorl.errors import StorageError, UsageError

FILE, LOCK = "journal.sqlite", "lock"
LAYOUT = 1
"""Of the tables; a journal of another one is refused."""
BUSY_MS = 10_000

R = TypeVar("R")
"""A frozen dataclass: one row. Its first field is the key; fields of type ``dict`` are kept as JSON."""


class Journal:
    """One server's memory. From any thread."""

    def __init__(self, folder: Path) -> None:
        """
        Args:
            folder: Of the server; made where it is not there.

        Raises:
            UsageError: Another server has it, or a version of nemorl with other tables wrote it.
            StorageError: It cannot be written.
        """
        with storing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            self._lock_file: IO[str] = (folder / LOCK).open("w")
        try:
            fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._lock_file.close()
            raise UsageError(
                f"another server works in {folder}", fix="end it, or give this one another --directory"
            ) from error
        self._lock = threading.RLock()
        self._depth = 0
        self._reads = threading.Lock()
        try:
            self._write, self._read = (_connected(folder / FILE) for _ in range(2))
        except sqlite3.Error as error:
            self._lock_file.close()
            raise StorageError(
                f"the journal in {folder} cannot be used: {error}", fix="move the folder away"
            ) from error
        (found,) = self._write.execute("PRAGMA user_version").fetchone()
        if found not in (0, LAYOUT):
            self.close()
            raise UsageError(
                f"the journal in {folder} has layout {found}, and this version of nemorl reads {LAYOUT}",
                fix="start the version that wrote it, or give another --directory",
            )
        self._write.execute(f"PRAGMA user_version = {LAYOUT}")

    @contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """All writes of the block are kept, or none. Blocks may be nested: the outermost counts.

        Raises:
            StorageError: The disk refuses.
        """
        with self._lock:
            self._depth += 1
            try:
                if self._depth == 1:
                    self._write.execute("BEGIN IMMEDIATE")
                yield self._write
                if self._depth == 1:
                    self._write.execute("COMMIT")
            except BaseException as error:
                if self._depth == 1 and self._write.in_transaction:
                    self._write.execute("ROLLBACK")
                if isinstance(error, sqlite3.OperationalError):
                    raise StorageError(f"the journal cannot be written: {error}", fix="free some disk space") from error
                raise
            finally:
                self._depth -= 1

    def read(self, sql: str, *values: object) -> list[tuple[Any, ...]]:
        """Rows of a query, with all that was written before."""
        with self._reads:
            return self._read.execute(sql, values).fetchall()

    def close(self) -> None:
        """Let another server have the folder."""
        with self._lock, self._reads:
            self._write.close()
            self._read.close()
            self._lock_file.close()


def _connected(path: Path) -> sqlite3.Connection:
    found = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
    found.execute(f"PRAGMA busy_timeout = {BUSY_MS}")
    found.execute("PRAGMA journal_mode = WAL")
    found.execute("PRAGMA synchronous = FULL")
    return found


class Table(Generic[R]):
    """Rows of one kind."""

    def __init__(self, journal: Journal, kind: type[R], name: str, *, unique: Sequence[str] = ()) -> None:
        """
        Args:
            journal: Where they are kept.
            kind: Their class.
            name: Of the table.
            unique: Columns that no two rows have alike.
        """
        self._journal, self._kind, self._name = journal, kind, name
        self._columns = [field.name for field in fields(kind)]  # type: ignore[arg-type]
        hints = get_type_hints(kind)
        self._json = [dict in (hints[column], getattr(hints[column], "__origin__", None)) for column in self._columns]
        self._key = self._columns[0]
        others = "".join(f", {column}" for column in self._columns[1:])
        alike = f", UNIQUE ({', '.join(unique)})" if unique else ""
        with journal.writing() as db:
            db.execute(f"CREATE TABLE IF NOT EXISTS {name} ({self._key} TEXT PRIMARY KEY{others}{alike})")

    def get(self, key: str) -> R | None:
        """The row of a key."""
        found = self.where(f"{self._key} = ?", key)
        return found[0] if found else None

    def where(self, condition: str, *values: object) -> list[R]:
        """Rows that satisfy a condition of SQL, which may end in an order and a limit."""
        columns = ", ".join(self._columns)
        rows = self._journal.read(f"SELECT {columns} FROM {self._name} WHERE {condition}", *values)
        return [self._row(row) for row in rows]

    def count(self, condition: str, *values: object) -> int:
        """Rows that satisfy a condition of SQL."""
        (found,) = self._journal.read(f"SELECT COUNT(*) FROM {self._name} WHERE {condition}", *values)[0]
        return int(found)

    def put(self, row: R) -> None:
        """Keep a row, in place of the one with its key."""
        given: tuple[Any, ...] = astuple(row)  # type: ignore[call-overload]
        values = [json.dumps(value) if is_json else value for value, is_json in zip(given, self._json, strict=True)]
        marks = ", ".join("?" * len(values))
        with self._journal.writing() as db:
            db.execute(f"INSERT OR REPLACE INTO {self._name} ({', '.join(self._columns)}) VALUES ({marks})", values)

    def change(self, key: str, **changes: object) -> None:
        """Set columns of a row; one that is not there stays away."""
        found = self.get(key)
        if found is not None:
            self.put(replace(found, **changes))  # type: ignore[type-var]

    def remove(self, key: str) -> None:
        """Forget a row."""
        with self._journal.writing() as db:
            db.execute(f"DELETE FROM {self._name} WHERE {self._key} = ?", (key,))

    def _row(self, values: tuple[Any, ...]) -> R:
        made = [json.loads(value) if is_json else value for value, is_json in zip(values, self._json, strict=True)]
        return self._kind(*made)


def text_values(given: Mapping[str, Any] | None) -> dict[str, str]:
    """A client's metadata, with texts for values, as answers have it."""
    return {key: value if isinstance(value, str) else json.dumps(value) for key, value in (given or {}).items()}
