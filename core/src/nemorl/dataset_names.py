"""A dataset by its name: an installed one, a local file or folder, or one of the Hugging Face hub, in this order.

Reading tables and mapping their columns is the work of the dataset plugins ``file`` and ``huggingface``; here only the
choice is made. Rows and splits that are already in memory are in ``data``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from nemorl.config.component import missing_modules
from nemorl.config.load import validate
from nemorl.data import SPLITS
from nemorl.errors import UsageError
from nemorl.plugins import registry
from nemorl.plugins.kinds import DatasetConfig
from nemorl.reading import expanded, shown
from nemorl.suggest import did_you_mean
from nemorl.types import Row

TABLES = (".jsonl", ".ndjson", ".json", ".parquet", ".csv", ".tsv")
"""Files that the ``file`` dataset reads."""
HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+")
SAVED_TO_DISK = ("dataset_dict.json", "state.json")
"""What ``datasets.save_to_disk`` leaves in a folder."""


def named_dataset(name: str | Path) -> DatasetConfig:
    """The dataset that a text or path means.

    Args:
        name: Name of an installed dataset (``arithmetic``), path of a file or folder of files, or ``org/name`` on the
            hub. Where several apply, the first does; ``./arithmetic`` is always a path.

    Raises:
        UsageError: it is none of them; names what comes closest.
    """
    path = expanded(name)
    installed = [entry.name for entry in registry().index.of_kind("datasets")]
    if isinstance(name, str) and name.rpartition(":")[2] in installed:
        return configured_dataset(name, {})
    try:
        if path.is_dir():
            return _folder(path)
        if path.is_file():
            return configured_dataset("file", {"path": path})
    except OSError as error:
        message = f"{shown(str(name))} cannot be looked at ({error.strerror})"
        raise UsageError(message, fix="check the path, and the permissions of its folders") from error
    if isinstance(name, str) and HUB_NAME.fullmatch(name) and path.suffix not in TABLES:
        return configured_dataset("huggingface", {"path": name})
    beside = [str(other) for other in _beside(path)]
    guess = did_you_mean(str(name), [*installed, *beside])
    raise UsageError(
        f"no dataset {shown(str(name))}: not installed (there are {', '.join(installed) or 'none'}), no file or "
        "folder of this name, and not a name of the Hugging Face hub (org/name)",
        fix=guess or "pass rows, a path, or a dataset of `nemorl plugins list`",
    )


def configured_dataset(name: str, options: Mapping[str, Any]) -> DatasetConfig:
    """The config of an installed dataset with these options.

    Raises:
        PluginNotFoundError: no such dataset is installed; says what to install.
        ConfigError: every option that is wrong.
    """
    config_class = registry().load("datasets", name)
    problem = missing_modules("datasets", name, config_class)
    if problem is not None:
        raise UsageError(problem.message, fix=problem.fix)
    loaded: DatasetConfig = validate(config_class, options, source=f"dataset {name}")
    return loaded


class FolderConfig(DatasetConfig):
    """The tables of one folder, joined by split in the order of their names."""

    train: tuple[DatasetConfig, ...]
    """Files to train on."""
    validation: tuple[DatasetConfig, ...] = ()
    """Files to validate on."""

    def build(self, split: str) -> Sequence[Row] | None:
        files = self.train if split == "train" else self.validation
        tables = [table for file in files if (table := file.build("train")) is not None]
        return Joined(tables) if tables else None


class Joined(Sequence[Row]):
    """Several tables as one."""

    def __init__(self, tables: Sequence[Sequence[Row]]) -> None:
        self._tables = tables
        self._ends = list(accumulate(len(table) for table in tables))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        number = index if index >= 0 else index + len(self)
        for table, end in zip(self._tables, self._ends, strict=True):
            if number < end:
                return table[number - end]
        raise IndexError(index)


def _folder(folder: Path) -> DatasetConfig:
    """``train*`` and ``validation*`` files by their names; files of other names are all to train on."""
    saved = [name for name in SAVED_TO_DISK if (folder / name).is_file()]
    if saved:
        raise UsageError(
            f"{folder} was written by save_to_disk ({saved[0]})",
            fix=f"pass the object: datasets.load_from_disk({str(folder)!r})",
        )
    files = sorted(path for path in folder.iterdir() if path.suffix.lower() in TABLES and path.is_file())
    if not files:
        raise UsageError(
            f"{folder} holds no tables ({', '.join(TABLES)})", fix="give the folder of the files, or a file"
        )
    by_split = {split: _of_split(files, names) for split, names in SPLITS.items()}
    known = [name for names in SPLITS.values() for name in names]
    others = [file for file in files if not any(_is_named(file, name) for name in known)]
    if by_split["train"] and others:
        raise UsageError(
            f"{folder} holds train files and others ({', '.join(file.name for file in others[:5])}): "
            "which are to train on is not clear",
            fix="name the one you mean, or move the others away",
        )
    tables = {
        split: tuple(configured_dataset("file", {"path": file}) for file in found)
        for split, found in (by_split | {"train": by_split["train"] or others}).items()
    }
    if not tables["train"]:
        raise UsageError(f"{folder} holds no files to train on", fix="name one train.jsonl (or .parquet, .csv)")
    return FolderConfig(**tables)


def _of_split(files: Sequence[Path], names: Sequence[str]) -> list[Path]:
    """The files of the first of these names that any has."""
    by_name = ([file for file in files if _is_named(file, name)] for name in names)
    return next((found for found in by_name if found), [])


def _is_named(file: Path, name: str) -> bool:
    """``train.jsonl`` and ``train-00001.parquet`` are named ``train``, ``trainees.csv`` is not."""
    return re.match(rf"{name}(?![a-z])", file.name, re.IGNORECASE) is not None


def _beside(path: Path) -> list[Path]:
    return sorted(path.parent.iterdir())[:200] if path.parent.is_dir() else []
