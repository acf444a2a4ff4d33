"""``records/prompts.parquet``: what became of each prompt of a run that samples by it, as of the last checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemorl.base.files.atomic import replacing

from nemorl_cli.report.records.reading import FOLDER

if TYPE_CHECKING:
    import pyarrow as pa

FILE = "prompts.parquet"
STEP, ROWS = b"step", b"rows"
"""In the metadata of the file."""


@dataclass(frozen=True)
class PromptRecords:
    """The file of one run."""

    step: int
    """The last that it covers."""
    rows: int
    """Prompts in the data, asked or not."""
    table: pa.Table


def write_prompts(folder: Path, columns: Mapping[str, Sequence[Any]], step: int, rows: int) -> None:
    """Write the file in a folder of records, in place of an earlier one.

    Args:
        folder: ``records`` of a run.
        columns: Of equal length.
        step: The last of the run.
        rows: Prompts in the data.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    metadata = {STEP: str(step).encode(), ROWS: str(rows).encode()}
    folder.mkdir(parents=True, exist_ok=True)
    with replacing(folder / FILE) as file:
        pq.write_table(pa.table(dict(columns)).replace_schema_metadata(metadata), file, compression="zstd")


def read_prompts(run_dir: Path) -> PromptRecords | None:
    """The file of a run; ``None`` where there is none, or it is damaged."""
    path = run_dir / FOLDER / FILE
    if not path.is_file():
        return None
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as parquet:
            metadata = parquet.schema_arrow.metadata or {}
            return PromptRecords(int(metadata[STEP]), int(metadata[ROWS]), parquet.read())
    except (OSError, ValueError, KeyError):
        return None
