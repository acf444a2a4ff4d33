"""Reading rollout records: what is damaged is skipped, and said."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemorl.base.files.atomic import listed

if TYPE_CHECKING:
    import pyarrow as pa

FOLDER = "records"
"""In a run's directory: ``records/train/step_000020.parquet``."""
FILE_NAME = re.compile(r"step_(\d+)(?:\.(\d+))?\.parquet")
NAMED = ("components", "metrics")
"""Columns of named numbers."""


@dataclass(frozen=True, order=True)
class RecordFile:
    """A file of records, in order of step, split and part."""

    step: int
    split: str
    part: int
    path: Path

    @classmethod
    def of(cls, path: Path) -> RecordFile | None:
        """By its name; ``None`` where it is no file of records."""
        match = FILE_NAME.fullmatch(path.name)
        return cls(int(match[1]), path.parent.name, int(match[2] or 1), path) if match else None


def record_files(folder: Path, *, split: str | None = None, step: int | None = None) -> list[RecordFile]:
    """The files of a folder of records, in order of steps.

    Raises:
        StorageError: The system refuses to list it.
    """
    splits = [path for path in listed(Path(folder), split or "*") if path.is_dir()]
    found = [RecordFile.of(path) for one in splits for path in listed(one, "step_*.parquet")]
    return sorted(file for file in found if file is not None and step in (None, file.step))


def steps_of(run_dir: Path, split: str) -> list[int]:
    """The steps that a run has records of."""
    return sorted({file.step for file in record_files(run_dir / FOLDER, split=split)})


def read_table(file: RecordFile, columns: Sequence[str] | None = None) -> pa.Table:
    """The records of a file.

    Args:
        file: To read.
        columns: Those wanted, or a part of one (``turns.list.element.author``); ones that the file lacks are null.
            Unset: all.

    Raises:
        ValueError, OSError: It is damaged.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    from nemorl_cli.report.records.schema import SCHEMA, VERSION, VERSION_KEY

    with pq.ParquetFile(file.path) as parquet:
        version = (parquet.schema_arrow.metadata or {}).get(VERSION_KEY, b"").decode()
        if version != VERSION:
            raise ValueError(f"its records are of version {version or '?'}, this reads version {VERSION}")
        wanted = list(columns or SCHEMA.names)
        table = parquet.read([name for name in wanted if name.split(".")[0] in parquet.schema_arrow.names])
    for name in dict.fromkeys(name.split(".")[0] for name in wanted):
        if name not in table.column_names:
            table = table.append_column(name, pa.nulls(len(table), SCHEMA.field(name).type))
    return table


def read_records(
    run_dir: Path,
    *,
    split: str | None = None,
    step: int | None = None,
    columns: Sequence[str] | None = None,
    search: str | None = None,
    on_damage: Callable[[Path, str], None] = lambda _path, _why: None,
) -> Iterator[dict[str, Any]]:
    """Records of a run as dictionaries, in order of steps; ``components`` and ``metrics`` are mappings.

    Args:
        run_dir: Of the run.
        split: ``train`` or ``validation``. Unset: both.
        step: Unset: all.
        columns: Unset: all but ``turns`` and ``sequences``, which hold nearly all of the bytes.
        search: Only those with this text in prompt, response or answer, in any case of letters.
        on_damage: Told of each file that cannot be read, and why. It is skipped.
    """
    files = record_files(Path(run_dir) / FOLDER, split=split, step=step)
    if not files:
        return
    from nemorl_cli.report.records.schema import HEAVY, SCHEMA

    wanted = columns or [name for name in SCHEMA.names if name not in HEAVY]
    for file in files:
        try:
            table = read_table(file, wanted)
            rows = (table if search is None else _holding(table, search)).to_pylist()
        except (ValueError, OSError) as error:  # pyarrow's errors are both
            on_damage(file.path, " ".join(str(error).split()))
            continue
        for row in rows:
            yield {name: _mapping(value) if name in NAMED else value for name, value in row.items()}


def _holding(table: pa.Table, text: str) -> pa.Table:
    import pyarrow.compute as pc

    def has(column: str) -> Any:
        return pc.fill_null(pc.match_substring(table[column], text, ignore_case=True), False)

    return table.filter(pc.or_(pc.or_(has("prompt"), has("response")), has("answer")))


def _mapping(pairs: Sequence[Mapping[str, Any]] | None) -> dict[str, float]:
    return {pair["name"]: pair["value"] for pair in pairs or ()}


class RunRecords(Sequence[Mapping[str, Any]]):
    """The light columns of all records of a run, in order of steps. Read when looked at, file by file."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        return read_records(self._run_dir)

    def __getitem__(self, index: Any) -> Any:
        return list(self)[index]

    def __len__(self) -> int:
        return sum(1 for _ in read_records(self._run_dir, columns=["step"]))
