"""What users may pass as data and as reward, turned into what the kernel works with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic_core import PydanticCustomError

from nemorl.config.component import Component
from nemorl.config.run import RunConfig
from nemorl.contracts import DataModule
from nemorl.data import RowDataModule, Table, as_rows, split_of
from nemorl.dataset_names import configured_dataset, named_dataset
from nemorl.environments import Environment, RewardFunction, WeightedEnvironment
from nemorl.environments.composition import Part, named_parts
from nemorl.errors import ConfigError, Problem, UsageError, boundary
from nemorl.plugins.kinds import DatasetConfig, EnvironmentConfig
from nemorl.types import Row

DataSource = str | Path | Mapping[str, Any] | Table | DatasetConfig | DataModule
"""What may be given as data:

- the name of an installed dataset, a file, a folder of files or a dataset of the Hugging Face hub (``org/name``);
- a mapping ``{"name": …, …options}`` as in configs;
- rows: a list of mappings, a ``datasets.Dataset``, or both splits as ``{"train": rows, "validation": rows}``;
- a dataset config, or a ready ``DataModule``.
"""
RewardSource = Callable[..., Any] | Environment | EnvironmentConfig | str | Mapping[str, Any] | Sequence[Any]
"""``f(prompt, response)`` or ``f(prompts, responses)``, an environment, its config, or its name; or several of these,
whose rewards add up: ``[f, "math", (g, 0.1)]``, or by name ``{"correct": "math", "format": (f, 0.1)}``."""


def require_sources(source: Any, scorer: Any, config: RunConfig) -> None:
    """Refuse a run that has no data, or nothing that scores its responses where its algorithm needs that.

    Raises:
        ConfigError: names what is missing.
    """
    problems = []
    if source is None:
        problems.append(Problem("data", "no dataset given", "pass one to fit(dataset=…) or set `data:`"))
    if scorer is None and config.needs_generation and config.needs_environment:
        fix = "pass fit(reward_fn=…) or set `environment:`"
        problems.append(Problem("environment", "nothing scores the responses", fix))
    if problems:
        raise ConfigError(problems, source=type(config).__name__)


def open_data(source: DataSource, config: RunConfig, batch_size: int) -> DataModule:
    """Whatever the user calls data, as a ``DataModule``."""
    if isinstance(source, DataModule):
        return source
    rows = rows_of(source, "train")
    if rows is None:
        raise UsageError("the dataset has no train split", fix="check the options of `data:`")
    owner = f"dataset {type(source).__name__}" if isinstance(source, DatasetConfig) else "the dataset"
    return RowDataModule(rows, batch_size, seed=config.seed, owner=owner)


def held_out_rows(source: DataSource, given: DataSource | None, config: RunConfig) -> Sequence[Row] | None:
    """Rows to validate on: those given, else those of the config, else the validation split of the data."""
    held_out = given if given is not None else config.validation.data or source
    found = None if isinstance(held_out, DataModule) else rows_of(held_out, "validation")
    return rows_of(given, "train") if given is not None and found is None else found


def rows_of(source: Any, split: str) -> Sequence[Row] | None:
    """The rows of one split of any data source but a ``DataModule``; ``None`` where it has no such split.

    Raises:
        UsageError: nothing has the name, or the object holds no rows.
        ConfigError: the options of the dataset are wrong.
    """
    if isinstance(source, str | Path):
        source = named_dataset(source)
    elif isinstance(source, Mapping) and isinstance(source.get("name"), str):
        source = configured_dataset(source["name"], {key: value for key, value in source.items() if key != "name"})
    if isinstance(source, DatasetConfig):
        with boundary(f"dataset {type(source).__name__}"):
            return source.build(split)
    if isinstance(source, Mapping):
        return split_of(source, split)
    return as_rows(source) if split == "train" else None


def as_environment(source: Any) -> Environment | None:
    """An environment, its config, name or mapping with a name, a function, several of these, or nothing."""
    if source is None or isinstance(source, Environment):
        return source
    if isinstance(source, list | tuple) and source:
        source = named_parts(source)
    if isinstance(source, Mapping) and any(_is_part(part) for part in source.values()):
        return WeightedEnvironment(source, lead="correct" if "correct" in source else None)
    if isinstance(source, str | Mapping):
        try:
            source = Component("environments").resolve(source)
        except PydanticCustomError as error:
            found = error.context or {}
            raise UsageError(found["message"], fix=found["fix"]) from error
    if isinstance(source, EnvironmentConfig):
        with boundary(f"environment {type(source).__name__}"):
            return source.build()  # type: ignore[return-value]
    if callable(source):
        return RewardFunction(source)
    raise UsageError(f"{source!r} cannot score responses", fix="pass f(prompt, response), an Environment or its name")


def _is_part(value: Any) -> bool:
    """It scores responses, so the mapping that holds it names several rewards and is no plugin's options."""
    return callable(value) or isinstance(value, Environment | EnvironmentConfig | Part | tuple)
