"""Datasets by what users call them: a preset's name, a local file or folder, a name of the Hugging Face hub.

``find_dataset`` makes a dataset of it, ``SPELLINGS`` the options that a config would spell it with.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nemorl.base.text.reading import expanded, is_file, is_folder, shown
from nemorl.base.text.suggest import did_you_mean
from nemorl.config.component import missing_modules
from nemorl.config.load import validate
from nemorl.errors import UsageError
from nemorl.plugins.kinds import DatasetConfig
from nemorl.plugins.slots import OtherSpellings
from nemorl.types import Row
from nemorl_rl.data.mixtures import Joined
from nemorl_rl.data.rows import SPLITS

from nemorl_tasks.datasets import files, preset_file
from nemorl_tasks.datasets.config import FileConfig, HuggingFaceConfig
from nemorl_tasks.datasets.hub import quiet
from nemorl_tasks.datasets.preset import PresetConfig

HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+")
SAVED_TO_DISK = ("dataset_dict.json", "state.json")
"""Files that ``datasets.save_to_disk`` leaves in a folder."""
BY_NAME: Mapping[str, type[DatasetConfig]] = {
    "preset": PresetConfig,
    "file": FileConfig,
    "huggingface": HuggingFaceConfig,
}
"""The datasets that a name or path may mean."""
LONGEST_PATH = 4_096
"""Characters of a path on Linux; what is longer is no name of a dataset."""
NO_TABLES = ("config.json", "dataset_info.json", "dataset_infos.json")
"""Files that describe a dataset of the hub."""
NAMES = {
    "train": (*SPLITS["train"], "training"),
    "validation": (*SPLITS["validation"], "testing", "eval", "evaluation"),
}
"""Words in the names of files, and what they are for: those that the ``datasets`` library knows."""


def find_dataset(name: str | Path, installed: Sequence[str] = ()) -> DatasetConfig:
    """The dataset that a name or path means: ``nemorl.find_dataset("gsm8k")``, ``nemorl.find_dataset("rows.jsonl")``.

    Args:
        name: Name of a preset, path of a preset file, of a file or folder of rows, or ``org/name`` on the hub. The
            first of these that there is; a ``Path`` is a path.
        installed: Names of other datasets, which the error may suggest.

    Raises:
        UsageError: it is none of them; names what comes closest.

    Example:
        >>> find_dataset("openai/gsm8k").path
        'openai/gsm8k'
    """
    path = expanded(name)
    text = str(path.absolute()) if isinstance(name, Path) else name
    try:
        if not _is_preset(text) and is_folder(path):
            return _folder(path)
        spelled = _spelled(text)
    except OSError as error:
        message = f"{shown(str(name))} cannot be looked at ({error.strerror})"
        raise UsageError(message, fix="check the path, and the permissions of its folders") from error
    if spelled is not None:
        options = {key: value for key, value in spelled.items() if key != "name"}
        return _configured(BY_NAME[spelled["name"]], spelled["name"], options)
    beside = [str(other) for other in _beside(path)]
    guess = preset_file.closest(str(name)) or did_you_mean(str(name), [*installed, *beside])
    raise UsageError(
        f"no dataset {shown(str(name))}: not installed (there are {', '.join(installed) or 'none'}), no preset "
        "(`nemorl datasets` lists them), no file or folder of this name, and not a name of the Hugging Face hub "
        "(org/name)",
        fix=guess or "pass rows, a path, or a dataset of `nemorl plugins list`",
    )


def _expand(value: Mapping[str, Any], installed: Sequence[str]) -> Mapping[str, Any] | None:
    """How a config spells a dataset that no plugin has the name of: ``_expand({"name": "gsm8k"}, ())``.

    Args:
        value: What was written, as a mapping with ``name`` and options; or a mapping of names to several datasets.
        installed: Names of the installed datasets.

    Returns:
        A mapping with the name of an installed dataset, or ``None`` where nothing is known of such a name.

    Raises:
        UsageError: a preset is called almost so, and no installed dataset is.

    Example:
        >>> _expand({"name": "gsm8k", "max_rows": 10}, ["file"])
        {'name': 'preset', 'preset': 'gsm8k', 'max_rows': 10}
    """
    if _are_sets(value):
        return {"name": "sets", "sets": dict(value)}
    name = value.get("name")
    if not isinstance(name, str) or len(name) > LONGEST_PATH:
        return None
    try:
        spelled = _spelled(name)
    except OSError:  # no path, then
        return None
    if spelled is not None:
        return {**spelled, **{key: option for key, option in value.items() if key != "name"}}
    if files.is_table(name):
        return {**value, "name": "file", "path": name}
    if Path(name).suffix in preset_file.SUFFIXES:
        return {**value, "name": "preset", "preset": name}
    guess = preset_file.closest(name)
    if guess is not None and did_you_mean(name, installed) is None:
        raise UsageError(f"no dataset is called {shown(name)}", fix=f"{guess} `nemorl datasets` lists the presets")
    return None


def _schemas(names: Sequence[str]) -> list[dict[str, Any]]:
    """JSON schemas of what stands for a dataset besides the ``names`` of plugins: any text, or several by name.

    >>> [form["type"] for form in _schemas(["file"])]
    ['string', 'object', 'object']
    """
    several = {"additionalProperties": {"type": ["string", "object"]}, "not": {"required": ["name"]}}
    other = {"properties": {"name": {"not": {"enum": list(names)}}}, "required": ["name"]}
    return [{"type": "string"}, {"type": "object", **other}, {"type": "object", **several}]


SPELLINGS = OtherSpellings(_expand, _schemas)
"""Of datasets in a config."""


def _are_sets(value: Mapping[str, Any]) -> bool:
    """Whether a mapping has several datasets by name, and not the options of one whose name was forgotten."""
    options = {option for config_class in BY_NAME.values() for option in config_class.model_fields}
    return (
        bool(value)
        and not (options | {"name"}) & {*map(str, value)}
        and all(
            isinstance(part, str) or (isinstance(part, Mapping) and isinstance(part.get("name"), str))
            for part in value.values()
        )
    )


def _spelled(name: str) -> dict[str, Any] | None:
    """The options that mean a name or path, but for folders, whose files each are a dataset."""
    if _is_preset(name):
        return {"name": "preset", "preset": name}
    path = expanded(name)
    if is_file(path):
        return {"name": "file", "path": name}
    if HUB_NAME.fullmatch(name) and not files.is_table(name) and not os.path.exists(path):
        return {"name": "huggingface", "path": name}
    return None


def _is_preset(name: str) -> bool:
    return preset_file.has_preset(name) or preset_file.is_preset_file(name)


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
        found = self.train if split == "train" else self.validation
        tables = [table for file in found if (table := file.build("train")) is not None]
        return Joined(tables) if tables else None


def _folder(folder: Path) -> DatasetConfig:
    """The tables of a folder by their names; one that has them in folders of its own is laid out as on the hub."""
    saved = [name for name in SAVED_TO_DISK if (folder / name).is_file()]
    if saved:
        raise UsageError(
            f"{folder} was written by save_to_disk ({saved[0]})",
            fix=f"pass the object: datasets.load_from_disk({str(folder)!r})",
        )
    if found := sorted(path for path in folder.iterdir() if _is_table(path)):
        return _tables(folder, found)
    if any(_is_table(path) for path in folder.glob("*/**/*") if not path.relative_to(folder).parts[0].startswith(".")):
        return _repository(folder)
    raise UsageError(
        f"{folder} holds no tables ({', '.join(files.SUPPORTED)})", fix="give the folder of the files, or a file"
    )


def _is_table(path: Path) -> bool:
    return files.is_table(path) and path.name not in NO_TABLES and path.is_file()


def _tables(folder: Path, tables: Sequence[Path]) -> FolderConfig:
    """Those whose names say ``validation`` or ``test`` are to validate on; those that say ``train`` to train on, where
    none does all others."""
    says = {name: [file for file in tables if _says(file, name)] for names in NAMES.values() for name in names}
    train = [file for name in NAMES["train"] for file in says[name]]
    held_out = [file for name in NAMES["validation"] for file in says[name]]
    others = [file for file in tables if file not in train and file not in held_out]
    if both := [file.name for file in train if file in held_out]:
        raise UsageError(f"{folder}: {both[0]} may be to train or to validate on", fix="name it after one split")
    if train and others:
        raise UsageError(
            f"{folder} holds train files and others ({', '.join(file.name for file in others[:5])}): "
            "which are to train on is not clear",
            fix="name the one you mean, or move the others away",
        )
    if not (train or others):
        raise UsageError(f"{folder} holds no files to train on", fix="name one train.jsonl (or .parquet, .csv)")
    validation = next((says[name] for name in NAMES["validation"] if says[name]), [])
    splits = {"train": train or others, "validation": validation}
    return FolderConfig(
        **{
            split: tuple(_configured(FileConfig, "file", {"path": file}) for file in found)
            for split, found in splits.items()
        }
    )


def _says(file: Path, name: str) -> bool:
    """``train.jsonl``, ``Train-00001.parquet`` and ``gsm8k_train.csv`` say ``train``, ``trainees.csv`` does not."""
    return re.search(rf"(?<![a-z]){name}(?![a-z])", file.name.lower()) is not None


def _repository(folder: Path) -> DatasetConfig:
    """A folder as a repository of the hub has it: its splits are those that the ``datasets`` library finds."""
    import datasets

    fix = f"say which part: data: {{name: huggingface, path: {folder}, config_name: …, train_split: …}}"
    try:
        with quiet():
            splits = [str(split) for split in datasets.get_dataset_split_names(str(folder))]
    except Exception as error:  # whatever the library and its parsers raise
        reason = " ".join(str(error).split())[:300]
        raise UsageError(f"{folder} is not clear to the datasets library: {reason}", fix=fix) from error
    if "train" not in splits:
        raise UsageError(f"{folder} has no split 'train' (it has {', '.join(splits) or 'none'})", fix=fix)
    held_out = next((name for name in NAMES["validation"] if name in splits), None)
    return _configured(HuggingFaceConfig, "huggingface", {"path": str(folder), "validation_split": held_out})


def _beside(path: Path) -> list[Path]:
    return sorted(path.parent.iterdir())[:200] if is_folder(path.parent) else []
