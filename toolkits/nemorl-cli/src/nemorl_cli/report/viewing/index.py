"""RecordIndex: the records of a run in SQLite, for sorting, filtering and searching hundreds of thousands of them.

The Parquet files stay the truth: the index follows them file by file, each in one transaction, and can be thrown away
at any time. It is kept outside of the run's directory. What lists show is apart from what they are sorted and filtered
by: that is small enough to be gone through as a whole. Texts are searched with FTS5, whose table holds no text itself;
what it knows of records that are gone is harmless, for numbers of records are never used again.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemorl_cli.report.records.reading import FOLDER, RecordFile, read_table, record_files
from nemorl_cli.report.viewing.facts import COLUMNS, Fact, facts_of, shortened, summary_of

VERSION = 4
"""Of the tables below; an index of another version is made anew."""
NUMBERS = (
    *("reward", "advantage", "kl", "mismatch", "gradient", "tokens", "prompt_tokens", "total_tokens", "num_turns"),
    *("began_s", "seconds"),
)
"""Columns that records are sorted by."""
TABLES = """
create table files (
  id integer primary key autoincrement, path text unique, size integer, changed integer,
  split text, step integer, part integer, summary text, damage text);
create table records (
  id integer primary key autoincrement, file integer, row integer, split text, step integer, group_id text,
  sample_id text, truncated integer, filtered integer, "right" integer, group_right integer, group_size integer,
  reward real, advantage real, kl real, mismatch real, gradient real, tokens integer, prompt_tokens integer,
  total_tokens integer, num_turns integer, began_s real, seconds real, numbers text);
create table facts (id integer primary key, fact text);
create index records_by_step on records (split, step);
create index records_by_file on records (file);
create index records_by_sample on records (sample_id);
create virtual table texts using fts5 (text, content='', tokenize='unicode61');
"""

COLUMNS_OF_RECORDS = 13 + len(NUMBERS)


@dataclass(frozen=True)
class Place:
    """Where a record is."""

    path: Path
    row: int


class RecordIndex:
    """The index of one run. Any thread may ask; one at a time may call ``update``.

    Example:
        >>> index = RecordIndex(Path("runs/mine"), Path("/tmp/mine.sqlite"))  # doctest: +SKIP
        >>> index.update()  # doctest: +SKIP
        4
    """

    def __init__(self, run_dir: Path, database: Path) -> None:
        """
        Args:
            run_dir: Of the run, which is only read.
            database: The index's file, made where it is missing, of another version or damaged.
        """
        self._folder, self._database = Path(run_dir) / FOLDER, Path(database)
        self._database.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._prepare()
        except sqlite3.DatabaseError:
            self._remove()
            self._prepare()

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """A connection to ask with; it sees whole files only."""
        with closing(self._connect()) as connection:
            yield connection

    def update(self, most: int | None = None) -> int:
        """Follow the records on disk, the newest steps first.

        Args:
            most: Files to read at most in this call. Unset: all.

        Returns:
            How many files were read or dropped; 0: the index is up to date.
        """
        present = {str(file.path.relative_to(self._folder)): file for file in record_files(self._folder)}
        with closing(self._connect()) as connection:
            known = {path: (size, changed) for path, size, changed in connection.execute(
                "select path, size, changed from files"
            )}  # fmt: skip
            states = {path: state for path, file in present.items() if (state := _state(file.path)) is not None}
            stale = [path for path in known if path not in states]
            fresh = [path for path, state in states.items() if known.get(path) != state]
            for path in stale:
                with connection:
                    _drop(connection, path)
            for path in fresh[::-1][:most]:
                with connection:
                    _drop(connection, path)
                    self._add(connection, path, present[path], states[path])
        return len(stale) + len(fresh[::-1][:most])

    def place_of(self, sample_id: str, split: str, step: int) -> Place | None:
        """Where a record is on disk."""
        with self.reading() as connection:
            found = connection.execute(
                "select files.path, records.row from records join files on files.id = records.file "
                "where sample_id = ? and records.split = ? and records.step = ?",
                (sample_id, split, step),
            ).fetchone()
        return None if found is None else Place(self._folder / found[0], found[1])

    def _add(self, connection: sqlite3.Connection, path: str, file: RecordFile, state: tuple[int, int]) -> None:
        facts: list[Fact] = []
        texts: list[str] = []
        damage = None
        try:
            facts, texts = _read(file)
        except (ValueError, OSError) as error:  # pyarrow's errors are both
            damage = " ".join(str(error).split())
        summary = json.dumps(summary_of(facts))
        number = connection.execute(
            "insert into files (path, size, changed, split, step, part, summary, damage) "
            "values (?, ?, ?, ?, ?, ?, ?, ?)",
            (path, *state, file.split, file.step, file.part, summary, damage),
        ).lastrowid
        assert number is not None, "SQLite numbers what it inserts"
        first = _next_record(connection)
        rows = [_row(first + place, number, place, file, fact) for place, fact in enumerate(facts)]
        connection.executemany(f"insert into records values ({', '.join('?' * COLUMNS_OF_RECORDS)})", rows)
        connection.executemany(
            "insert into facts values (?, ?)",
            ((first + place, json.dumps(shortened(fact))) for place, fact in enumerate(facts)),
        )
        connection.executemany(
            "insert into texts (rowid, text) values (?, ?)", ((first + place, text) for place, text in enumerate(texts))
        )

    def _prepare(self) -> None:
        with closing(self._connect()) as connection:
            (version,) = connection.execute("pragma user_version").fetchone()
            if version == VERSION:
                return
        self._remove()
        with closing(self._connect()) as connection:
            connection.executescript(f"begin; {TABLES} pragma user_version = {VERSION}; commit;")

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self._database, timeout=30.0)
        connection.execute("pragma journal_mode = wal")
        connection.execute("pragma synchronous = off")  # a lost index is made anew
        return connection

    def _remove(self) -> None:
        for ending in ("", "-wal", "-shm"):
            Path(f"{self._database}{ending}").unlink(missing_ok=True)


def _read(file: RecordFile) -> tuple[list[Fact], list[str]]:
    """The facts of a file's records, and the text of each that is searched."""
    table = read_table(file, COLUMNS)
    facts = facts_of(table)
    turns: Sequence[Any] = [None] * len(facts)
    if any((fact["num_turns"] or 0) > 1 for fact in facts):
        turns = read_table(file, ["turns"])["turns"].to_pylist()
    return facts, [_text(fact, said) for fact, said in zip(facts, turns, strict=True)]


def _text(fact: Fact, turns: Sequence[dict[str, Any]] | None) -> str:
    parts = [fact["prompt"], fact["response"], fact["answer"], *(turn["text"] for turn in turns or ())]
    return "\n".join(part for part in dict.fromkeys(parts) if part)


def _row(number: int, file_number: int, place: int, file: RecordFile, fact: Fact) -> tuple[Any, ...]:
    numbers = fact["components"] | {f"metrics/{name}": value for name, value in fact["metrics"].items()}
    return (
        *(number, file_number, place, file.split, file.step, fact["group_id"], fact["sample_id"]),
        *(fact["finish_reason"] == "length", fact["filtered"] is not None),
        *(fact["right"], fact["group_right"], fact["group_size"]),
        *(fact[name] for name in NUMBERS),
        json.dumps(numbers),
    )


def _next_record(connection: sqlite3.Connection) -> int:
    found = connection.execute("select seq from sqlite_sequence where name = 'records'").fetchone()
    return 1 if found is None else int(found[0]) + 1


def _drop(connection: sqlite3.Connection, path: str) -> None:
    of_path = "(select records.id from records join files on files.id = records.file where path = ?)"
    connection.execute(f"delete from facts where id in {of_path}", (path,))
    connection.execute("delete from records where file in (select id from files where path = ?)", (path,))
    connection.execute("delete from files where path = ?", (path,))


def _state(path: Path) -> tuple[int, int] | None:
    """(bytes, time of the last change); ``None`` for a file that is gone by now."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_size, found.st_mtime_ns
