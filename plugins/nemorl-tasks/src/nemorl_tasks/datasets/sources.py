"""The table behind a preset: its splits on the hub, files of its repository, or a local file or folder instead."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nemorl.base.text.reading import expanded
from nemorl.errors import DataError
from nemorl.types import Row
from nemorl_rl.data.mixtures import Joined

from nemorl_tasks.datasets import files, hub
from nemorl_tasks.datasets.preset_file import Preset

Table = Sequence[Mapping[str, Any]]
SLICE = re.compile(r"(?P<name>[^\[]+)\[.*\]")
"""A part of a split, as the ``datasets`` library writes it: ``train[:10%]``."""


def read_table(preset: Preset, path: str | None, split: str, revision: str | None) -> Table:
    """The rows of a split as they are published.

    Args:
        preset: Where they are.
        path: A local file or folder in place of the hub, a pattern of files (``shards/*.arrow``), or another
            repository.
        split: Name of the split. A single file is all splits.
        revision: Of the repository.

    Raises:
        DataError: there are none, or they cannot be read.
    """
    if path is None:
        assert preset.hub is not None, "PresetConfig.problems asks for a path"
        return _published(preset, preset.hub, split, revision)
    if "*" in path or "://" in path:
        return hub.load_files(path)  # type: ignore[no-any-return]
    local = expanded(path)
    if local.is_file() and local.suffix.lower() in (".arrow", ".txt"):
        return hub.load_files(str(local))  # type: ignore[no-any-return]
    if local.is_dir():
        return _folder(local, preset, split)
    if local.exists() or files.is_table(local) or not re.fullmatch(r"[\w.-]+/[\w.-]+", path):
        return files.read(local)
    return _published(preset, path, split, revision)


def undecoded(table: Table) -> Table:
    """A table of the ``datasets`` library with its images and sounds as they are stored, ``{"bytes": …, "path": …}``:
    what decodes them is chosen where they are used. Other tables as they are."""
    datasets = sys.modules.get("datasets")
    return _Undecoded(table) if datasets is not None and isinstance(table, datasets.Dataset) else table


class _Undecoded(Sequence[Mapping[str, Any]]):
    """Rows of the Arrow table behind a ``datasets.Dataset``."""

    def __init__(self, table: Any) -> None:
        self._table = table.with_format("arrow")

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[number] for number in range(len(self))[index]]
        return self._table[int(index)].to_pylist()[0]


def first_row(path: str) -> Row | None:
    """The first row of a local file, without the rest; ``None`` for what is no such file.

    Raises:
        DataError: the file is not there, or not readable.
    """
    local = expanded(path)
    is_file = (files.is_table(local) or local.suffix.lower() == ".gz") and not local.is_dir()
    return files.first_row(local) if is_file and "*" not in path and "://" not in path else None


def _published(preset: Preset, repository: str, split: str, revision: str | None) -> Table:
    if preset.files:
        return _joined([files.read(hub.download_file(repository, name, revision)) for name in preset.files])
    return _joined([hub.load_split(repository, subset, split, revision) for subset in _subsets(preset)])


def _folder(folder: Path, preset: Preset, split: str) -> Table:
    """A folder laid out as the hub has it: ``[subset/]train.jsonl``, or the files that the preset names."""
    if sliced := SLICE.fullmatch(split):
        raise DataError(f"{split!r} is a part of a split of the hub", fix=f"write {sliced['name']!r}, and max_rows")
    if preset.files:
        return _joined([files.read(folder / name) for name in preset.files])
    return _joined([_split_in(folder / subset if subset else folder, split) for subset in _subsets(preset)])


def _split_in(folder: Path, split: str) -> Table:
    found = [path for suffix in files.SUPPORTED for path in sorted(folder.glob(f"{split}*{suffix}"))]
    if not found:
        names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
        raise DataError(
            f"{folder} has no file of the split {split!r} (it has {', '.join(names[:8]) or 'nothing'})",
            fix=f"write it as {folder / split}.jsonl, or name another split",
        )
    return _joined([files.read(path) for path in found])


def _subsets(preset: Preset) -> tuple[str | None, ...]:
    return preset.subset if isinstance(preset.subset, tuple) else (preset.subset,)


def _joined(tables: Sequence[Table]) -> Table:
    return tables[0] if len(tables) == 1 else Joined(tables)
