"""Values of a row by the names that presets give columns: a column, a part of one, or text filled from several."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nemorl.base.text.suggest import did_you_mean
from nemorl.errors import DataError

from nemorl_tasks.datasets.mapping import fill_template


def look_up(row: Mapping[str, Any], column: str, place: str) -> Any:
    """The value of a column, of a part of one (``answers.text.0``), or a text filled from several (``Q: {question}``).

    Raises:
        DataError: it is not there; names what is.
    """
    if not column:
        return ""
    if "{" in column:
        return fill_template(column, row, place)
    if column in row:
        return row[column]
    value: Any = row
    for part in column.split("."):
        if isinstance(value, Mapping) and part in value:
            value = value[part]
        elif isinstance(value, list) and part.isdecimal() and int(part) < len(value):
            value = value[int(part)]
        else:
            raise _missing(row, column, place)
    return value


def _missing(row: Mapping[str, Any], column: str, place: str) -> DataError:
    names = [str(name) for name in row]
    return DataError(
        f"{place}: no column {column!r} (it has {', '.join(names) or 'none'})",
        fix=did_you_mean(column, names)
        or "these are rows of another dataset: name the right one, or map its columns (columns: {prompt: …})",
    )
