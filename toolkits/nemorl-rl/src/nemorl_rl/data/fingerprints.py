"""Fingerprints of rows and files: short texts that differ where the contents do, found without reading all of much.

A table of up to ``WHOLE`` rows is read whole. Of a longer one as many rows are, at fixed places, and the bytes of the
file that it comes from; of one that computes its rows (any ``Sequence`` of a user), ``COMPUTED``, since nobody knows
what a row of it costs. Of :mod:`code <nemorl_rl.data.code_fingerprints>`, see there.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import date, time
from decimal import Decimal
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from nemorl.base.files.atomic import loading
from nemorl.contracts import Fingerprinted

WHOLE = 4096
"""Rows: tens of milliseconds of a list, half a second of a ``datasets.Dataset``."""
COMPUTED = 64
BLOCK_BYTES = 1 << 20
WHOLE_FILE_BLOCKS = 1 << 10
"""A gibibyte takes half a second; of a larger file as many blocks are read, at fixed places."""
DIGITS = 16
"""Of a digest: changes are found, nobody is to be convinced."""


def rows_fingerprint(rows: Sequence[Any]) -> str:
    """Number of rows and a digest: the rows' own where they have one.

    Example:
        >>> rows_fingerprint([{"prompt": "1+1="}])[:5]
        '1 row'
    """
    if isinstance(rows, Fingerprinted):
        return rows.fingerprint()
    return sampled(rows, WHOLE if _is_stored(rows) else COMPUTED)


def sampled(rows: Sequence[Any], most: int = WHOLE, file: Path | None = None) -> str:
    """Number of rows and a digest of them, or of ``most`` of them and their file.

    Args:
        rows: By number.
        most: How many are read.
        file: Where they come from, if that is known.
    """
    count = len(rows)
    numbers = range(count) if count <= most else sorted(random.Random(0).sample(range(count), most))
    digest = hashlib.sha256()
    for number in numbers:
        digest.update(_as_bytes(rows, number))
    if count > most and file is not None:
        digest.update(file_digest(file).encode())
    return f"{count} row{'s' * (count != 1)}, {digest.hexdigest()[:DIGITS]}"


def joined(parts: Sequence[Sequence[Any]]) -> str:
    """Of tables one after the other; a table that occurs often is read once."""
    found = {id(part): part for part in parts}
    own = {key: rows_fingerprint(part) for key, part in found.items()}
    told = [own[id(part)] for part in parts]
    digest = hashlib.sha256("\n".join(told).encode()).hexdigest()[:DIGITS]
    return f"{sum(map(len, parts))} rows in {len(parts)} parts, {digest}"


def file_digest(path: Path, most_blocks: int = WHOLE_FILE_BLOCKS) -> str:
    """Of the bytes of a file.

    Args:
        path: Of the file.
        most_blocks: Of a file that has more, as many are read: the first, and others at fixed places.

    Raises:
        StorageError: it cannot be read.
    """
    digest = hashlib.sha256()
    with loading(path), path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        blocks = -(-size // BLOCK_BYTES)
        chosen: Sequence[int] = range(blocks)
        if blocks > most_blocks:
            chosen = [0, *sorted(random.Random(0).sample(range(1, blocks), most_blocks - 1))]
            digest.update(str(size).encode())
        for block in chosen:
            file.seek(block * BLOCK_BYTES)
            digest.update(file.read(BLOCK_BYTES))
    return digest.hexdigest()[:DIGITS]


def _is_stored(rows: Any) -> bool:
    datasets = sys.modules.get("datasets")
    return isinstance(rows, list | tuple) or (datasets is not None and isinstance(rows, datasets.Dataset))


def _as_bytes(rows: Sequence[Any], number: int) -> bytes:
    try:
        row = rows[number]
    except Exception as error:  # whoever asks for this row gets it again, with its place
        row = type(error).__name__
    try:
        return json.dumps(row, sort_keys=True, default=_plain).encode(errors="surrogatepass")
    except (TypeError, ValueError):  # keys of several types, or a circle
        return f"{type(row).__name__} of {len(row)}".encode()


PLAIN: Mapping[type, Callable[[Any], Any]] = {
    bytes: bytes.hex,
    date: str,  # and datetime
    time: str,
    Decimal: str,
    Integral: int,  # of numpy, as Real
    Real: float,
    Path: str,
    Mapping: dict,
    set: lambda value: sorted(map(repr, value)),
}


def _plain(value: Any) -> Any:
    """The value in JSON's types; for an unknown object its type alone: its text may hold its address."""
    of_type = (convert for kind, convert in PLAIN.items() if isinstance(value, kind))
    convert = next(of_type, lambda value: type(value).__name__)
    return convert(value)
