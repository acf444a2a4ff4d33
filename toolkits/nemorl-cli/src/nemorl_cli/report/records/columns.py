"""Columns of a table, from flat arrays where there is a value per token: Python lists cost fifty times as much."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from nemorl_cli.report.records.schema import NUMBERS
from nemorl_cli.report.records.tokens import Array, Field


def strings(texts: Sequence[str | None]) -> pa.Array:
    """Text that UTF-8 can hold: a model may write halves of pairs, each of which becomes ``?``."""
    try:
        return pa.array(texts, pa.string())
    except UnicodeEncodeError:
        sound = [None if text is None else text.encode("utf-8", errors="replace").decode("utf-8") for text in texts]
        return pa.array(sound, pa.string())


def doubles(values: Sequence[float | None]) -> pa.Array:
    """Numbers, some of which may be unknown."""
    return pa.array(values, pa.float64())


def named_numbers(rows: Sequence[Mapping[str, float]]) -> pa.Array:
    """A column of named numbers."""
    counts = [0, *map(len, rows)]
    names = strings([str(name) for row in rows for name in row])
    values = doubles([float(value) for row in rows for value in row.values()])
    structs = pa.StructArray.from_arrays([names, values], fields=list(NUMBERS.value_type))
    return pa.ListArray.from_arrays(pa.array(np.cumsum(counts), pa.int32()), structs)


def token_lists(values: Array, starts: Array, kind: pa.DataType) -> pa.Array:
    """A list of tokens' values for each sequence.

    Args:
        values: [T]
        starts: [S + 1] the first token of each sequence, and the end.
        kind: Of a value.
    """
    return pa.ListArray.from_arrays(pa.array(starts, pa.int32()), pa.array(values, kind))


def routes_column(routes: Array | None) -> dict[str, Any] | None:
    """The routes [T, L, K] of a sequence as a value of ``ROUTES``."""
    if routes is None:
        return None
    _, layers, experts = routes.shape
    return {"layers": layers, "experts_per_token": experts, "data": routes.astype("<i2").tobytes()}


def routes_of(value: Mapping[str, Any] | None) -> Array | None:
    """The same read back; files of older versions have none."""
    if value is None:
        return None
    return np.frombuffer(value["data"], "<i2").reshape(-1, value["layers"], value["experts_per_token"]).astype(np.int16)


def field_lists(field: Field | None, lengths: Array) -> pa.Array:
    """The same of a field; null for the sequences that lack it.

    Args:
        field: ``None``: all lack it.
        lengths: [S] of the sequences.
    """
    if field is None:
        return pa.nulls(len(lengths), pa.list_(pa.float32()))
    starts = np.cumsum([0, *np.where(field.has, lengths, 0)])
    offsets = pa.array(starts, pa.int32(), mask=np.append(~field.has, False))
    return pa.ListArray.from_arrays(offsets, pa.array(field.values, pa.float32()))
