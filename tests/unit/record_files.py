"""Rollout records of made-up runs, and what is in a file of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from nemorl_cli.report.records.reading import FOLDER, read_table, record_files
from nemorl_cli.report.records.schema import SCHEMA


def write_records(run_dir: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Files of records with these columns; all others are null."""

    def place(row: Mapping[str, Any]) -> tuple[str, int]:
        return row["split"], row["step"]

    for (split, step), found in groupby(sorted(rows, key=place), key=place):
        path = run_dir / "records" / split / f"step_{step:06}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.Table.from_pylist([dict(row) for row in found], SCHEMA), path)


def rows_of(run_dir: Path, step: int = 1, split: str = "train") -> list[dict[str, Any]]:
    """The records of one file."""
    (file,) = record_files(run_dir / FOLDER, split=split, step=step)
    found: list[dict[str, Any]] = read_table(file).to_pylist()
    return found
