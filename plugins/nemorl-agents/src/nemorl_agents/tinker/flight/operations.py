"""Operations: the requests of a loop in the order in which they ran, one file per optimizer step.

All that a step depends on is in the files up to it: bodies as they came, and which samples were drawn by one call, as
that computes its rows together. Answers are kept beside them, to be compared with.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from nemorl.base.files.atomic import listed, replacing
from nemorl.errors import DataError

FOLDER = "requests"
LOADED = "loaded"
"""Folder of states that a loop loaded, by the number of the request."""
FILE = re.compile(r"step_(\d{6,})\.parquet")


@dataclass(frozen=True)
class Operation:
    """One request that has run."""

    kind: str
    id: str
    """Of the request. Seeds of samples that name none follow from it."""
    seq: int
    body: bytes
    answer: bytes
    call: int = 0
    """Samples with the same number, from 1, were drawn together. 0: it is no sample."""
    weights: int = 0
    """Of a sample: the number of the request that saved its weights."""


SCHEMA = pa.schema(
    [
        ("kind", pa.string()),
        ("id", pa.string()),
        ("seq", pa.int64()),
        ("body", pa.binary()),
        ("answer", pa.binary()),
        ("call", pa.int64()),
        ("weights", pa.int64()),
    ]
)


def step_file(run_dir: Path, step: int) -> Path:
    """The file of a step."""
    return run_dir / FOLDER / f"step_{step:06}.parquet"


def recorded_steps(folder: Path) -> list[int]:
    """Steps whose file is there, in order."""
    return sorted(int(found[1]) for path in listed(folder) if (found := FILE.fullmatch(path.name)))


def write_step(path: Path, operations: Sequence[Operation]) -> None:
    """Write the file of a step; there is never half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    columns = zip(*(astuple(each) for each in operations), strict=True)
    arrays = [pa.array(column, field.type) for column, field in zip(columns, SCHEMA, strict=True)]
    with replacing(path) as file:
        pq.write_table(pa.Table.from_arrays(arrays, schema=SCHEMA), file, compression="zstd", use_dictionary=False)


def read_step(path: Path) -> list[Operation]:
    """Read the file of a step.

    Raises:
        DataError: It is damaged.
    """
    try:
        rows = pq.read_table(path, schema=SCHEMA).to_pylist()
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{path} cannot be read: {error}", fix="the steps before it can be made again") from error
    return [Operation(**{each.name: row[each.name] for each in fields(Operation)}) for row in rows]


def last_uses(folder: Path) -> dict[int, int]:
    """Weights that were sampled from, by the number of the request that saved them -> the last step that did."""
    return {
        int(weights): step
        for step in recorded_steps(folder)
        for weights in pq.read_table(step_file(folder.parent, step), columns=["weights"])["weights"]
        .unique()
        .to_pylist()
        if weights
    }


def last_seq(operations: Iterable[Operation]) -> int:
    """Number of the last request of the model among them, -1 if there is none: samplers count by themselves."""
    return max((each.seq for each in operations if each.kind != "sample"), default=-1)
