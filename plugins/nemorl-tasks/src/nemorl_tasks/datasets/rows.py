"""Rows that stay where they are until they are read, and the choice of which belong to a split."""

from __future__ import annotations

import random
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from nemorl.base.text.reading import expanded
from nemorl.errors import ConfigError, DataError
from nemorl.types import Row
from nemorl_rl.data.fingerprints import sampled

if TYPE_CHECKING:
    from nemorl_tasks.datasets.config import _Table


class RowMapping(Protocol):
    """How a row of a table becomes one of nemorl's."""

    def convert(self, row: Mapping[str, Any], *, number: int, source: str) -> dict[str, Any]:
        """The row, or ``DataError``."""


class MappedRows(Sequence[Row]):
    """Some rows of a table, each converted when it is read. Picklable when the table is."""

    def __init__(
        self,
        table: Sequence[Mapping[str, Any]],
        numbers: Sequence[int],
        mapping: RowMapping,
        source: str,
        file: Path | None = None,
    ) -> None:
        """
        Args:
            table: Rows as they are published.
            numbers: Of the chosen ones.
            mapping: Makes nemorl's rows of them.
            source: What errors call the table.
            file: That it was read from, if it is a single one.
        """
        self._table, self._numbers, self._mapping, self._source = table, numbers, mapping, source
        self._file = file

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return MappedRows(self._table, self._numbers[index], self._mapping, self._source, self._file)
        number = self._numbers[index]
        return self._mapping.convert(self._table[number], number=number, source=self._source)

    def fingerprint(self) -> str:
        """Of the converted rows, and of the file where these are many."""
        return sampled(self, file=self._file)


def select_rows(
    table: Sequence[Mapping[str, Any]], config: _Table, split: str, *, fraction: float, source: str | Path
) -> MappedRows:
    """The rows of ``split``, in the table's order.

    Raises:
        DataError: The table is empty, or too small to hold out ``fraction`` of it.
        ConfigError: The first row lacks a mapped column.
    """
    if not len(table):
        raise DataError(f"{source} has no rows", fix="choose another split or file")
    numbers: Sequence[int] = range(len(table))
    if fraction:
        train, validation = hold_out(len(table), fraction, config.seed)
        if not train:
            message = f"{source} has {len(table)} row(s): holding out {fraction:g} of them leaves none to train on"
            raise DataError(message, fix="lower validation_fraction, or add data")
        numbers = validation if split == "validation" else train
    if config.max_rows is not None:
        numbers = numbers[: config.max_rows]
    mapping = config.mapping()
    if found := list(mapping.problems(table[numbers[0]], where="path", source=str(source))):
        raise ConfigError(found, source="data")
    return MappedRows(table, numbers, mapping, str(source), local_file(source))


def local_file(source: str | Path | None) -> Path | None:
    """A local file by its name; ``None`` for folders, patterns and names of the hub."""
    path = expanded(source) if source is not None else None
    return path if path is not None and path.is_file() else None


def hold_out(size: int, fraction: float, seed: int) -> tuple[Sequence[int], Sequence[int]]:
    """Disjoint (train, validation) row numbers in ascending order; at least one for validation, if there is any."""
    count = min(size, max(1, round(size * fraction)))
    held_out = sorted(random.Random(f"validation/{seed}").sample(range(size), count))
    skip = set(held_out)
    return array("q", (number for number in range(size) if number not in skip)), array("q", held_out)
