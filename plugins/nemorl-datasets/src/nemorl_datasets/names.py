"""``nemorl.find_dataset``: a local file or folder, or a dataset of the Hugging Face hub, by its path or name."""

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
from nemorl.plugins.kinds import DatasetConfig
from nemorl.text.reading import expanded, shown
from nemorl.text.suggest import did_you_mean
from nemorl.types import Row

from nemorl_datasets.config import FileConfig, HuggingFaceConfig

TABLES = (".jsonl", ".ndjson", ".json", ".parquet", ".csv", ".tsv")
"""Files that the ``file`` dataset reads."""
HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+")
SAVED_TO_DISK = ("dataset_dict.json", "state.json")
"""What ``datasets.save_to_disk`` leaves in a folder."""


def find_dataset(name: str | Path, installed: Sequence[str] = ()) -> DatasetConfig:
    """The dataset that a path or a name of the hub means: ``nemorl.find_dataset("rows.jsonl")``.

    Args:
        name: Path of a file or folder of files, or ``org/name`` on the hub. Where both apply, the path does.
        installed: Names of other datasets, which the error may suggest.

    Raises:
        UsageError: it is none of them; names what comes closest.
    """
    path = expanded(name)
    try:
        if path.is_dir():
            return _folder(path)
        if path.is_file():
            return _configured(FileConfig, "file", {"path": path})
    except OSError as error:
        message = f"{shown(str(name))} cannot be looked at ({error.strerror})"
        raise UsageError(message, fix="check the path, and the permissions of its folders") from error
    if isinstance(name, str) and HUB_NAME.fullmatch(name) and path.suffix not in TABLES:
        return _configured(HuggingFaceConfig, "huggingface", {"path": name})
    beside = [str(other) for other in _beside(path)]
    guess = did_you_mean(str(name), [*installed, *beside])
    raise UsageError(
        f"no dataset {shown(str(name))}: not installed (there are {', '.join(installed) or 'none'}), no file or "
        "folder of this name, and not a name of the Hugging Face hub (org/name)",
        fix=guess or "pass rows, a path, or a dataset of `nemorl plugins list`",
    )


def _configured(config_class: type[DatasetConfig], name: str, options: Mapping[str, Any]) -> DatasetConfig:
    problem = missing_modules("datasets", name, config_class)
    if problem is not None:
        raise UsageError(problem.message, fix=problem.fix)
    return validate(config_class, options, source=f"dataset {name}")


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
        split: tuple(_configured(FileConfig, "file", {"path": file}) for file in found)
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
