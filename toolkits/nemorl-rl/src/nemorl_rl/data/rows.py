"""Data that users may pass, as batches of rows. Datasets themselves are plugins."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from nemorl.base.text.reading import shown
from nemorl.base.text.suggest import did_you_mean
from nemorl.config.component import Component, missing_modules
from nemorl.config.load import validate
from nemorl.config.run import RunConfig
from nemorl.contracts import DataModule, DataSource, HeldOut, Table
from nemorl.errors import DataError, UsageError, boundary
from nemorl.plugins import Registry, registry
from nemorl.plugins.kinds import DatasetConfig
from nemorl.types import Row

from nemorl_rl.config import RolloutRunConfig
from nemorl_rl.data.fingerprints import rows_fingerprint
from nemorl_rl.data.mixtures import Mixture, Order, RowSets, ShuffledOrder
from nemorl_rl.data.row_sizes import require_size
from nemorl_rl.data.validation_sets import HeldOutRows
from nemorl_rl.slots import FIND_DATASET

if TYPE_CHECKING:
    from nemorl_rl.curriculum.curriculum import Curriculum
    from nemorl_rl.curriculum.sampler import PromptSampler

SPLITS: Mapping[str, tuple[str, ...]] = {
    "train": ("train",),
    "validation": ("validation", "valid", "val", "dev", "test"),
}
"""The names that a split goes by, in order of preference."""


def as_rows(source: Any) -> Sequence[Row]:
    """``source`` itself, if it is a table of rows; the rows of a pandas ``DataFrame``, its missing values as None.

    Raises:
        UsageError: it is something else; says what to pass.
    """
    source = _of_data_frame(source)
    fix = 'pass rows ([{"prompt": …}, …], a datasets.Dataset or pandas.DataFrame), or the name or path of a dataset'
    if not isinstance(source, Table) or isinstance(source, str | bytes | Mapping):
        raise UsageError(f"a {type(source).__name__} is not a table of rows", fix=fix)
    if len(source) == 0:
        return []
    try:
        first = source[0]
    except (KeyError, TypeError, IndexError) as error:  # a table that is indexed by column
        raise UsageError(f"a {type(source).__name__} cannot be read by row number", fix=fix) from error
    if not isinstance(first, Mapping):
        raise UsageError(f"the first row is {first!r:.60}, not a mapping of columns", fix=fix)
    return cast("Sequence[Row]", source)  # only numbers are asked of it, and its length


def _of_data_frame(source: Any) -> Any:
    """The rows of a pandas ``DataFrame``; anything else as it is. Does not import pandas."""
    pandas = sys.modules.get("pandas")
    if pandas is None or not isinstance(source, pandas.DataFrame):
        return source
    if not source.columns.is_unique:
        raise UsageError("two columns of the DataFrame have the same name", fix="rename or drop one of them")
    table = source.astype(object).where(source.notna(), None)
    return [{str(name): value for name, value in row.items()} for row in table.to_dict("records")]


def split_of(splits: Mapping[Any, Any], split: str) -> Sequence[Row] | None:
    """One split of ``{"train": rows, "validation": rows}`` (a ``datasets.DatasetDict`` is one), if it is there."""
    if "train" not in splits:
        raise UsageError(
            f"a mapping with {', '.join(map(str, splits)) or 'nothing'} is no dataset",
            fix='pass {"train": rows, "validation": rows}, {"name": dataset, …options}, or the rows of one split',
        )
    found = next((splits[name] for name in SPLITS[split] if name in splits), None)
    return None if found is None else as_rows(found)


class RowDataModule:
    """Shuffled batches of rows, endlessly, with a position that can be saved.

    The order of an epoch depends on seed and epoch number only, so a position is one integer. Batches run across the
    end of an epoch: every row is seen exactly once per epoch, and all batches have the same size. A ``Mixture`` has an
    order of its own. With a sampler an epoch is as many rows, which its ``curriculum`` chooses.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        batch_size: int,
        *,
        seed: int,
        shuffle: bool = True,
        owner: str = "the dataset",
        max_tokens: int | None = None,
        accept_changed_data: bool = False,
        sampler: PromptSampler | None = None,
    ) -> None:
        """
        Args:
            rows: All there are.
            batch_size: Rows per batch.
            seed: Seeds the order.
            shuffle: Each epoch in another order; else in that of ``rows``.
            owner: What errors in reading a row call the dataset.
            max_tokens: Of a sequence: rows that are far longer are refused. Unset: nobody asks.
            accept_changed_data: Load the position of another number of rows.
            sampler: Chooses the rows of each batch, of a mixture within each part. Unset: the order does.
        """
        self._owner, self._max_tokens = owner, max_tokens
        if len(rows) == 0:
            raise DataError("the dataset has no rows", fix="check its path, split and filters")
        self._rows, self._batch_size, self._seed = rows, batch_size, seed
        self._position = 0
        self._strict_keys = ("seed", "shares") if accept_changed_data else ("rows", "seed", "shares")
        mixture = rows if isinstance(rows, Mixture) else None
        self._shares = mixture.shares if mixture is not None else None
        self._order: Order = ShuffledOrder(len(rows), seed=seed, shuffle=shuffle)
        if mixture is not None:
            self._order = mixture.order(seed=seed, shuffle=shuffle)
        self.curriculum: Curriculum | None = None
        """Chooses the rows of each batch, where there is a sampler."""
        if sampler is not None:
            from nemorl_rl.curriculum.curriculum import Curriculum

            sizes = mixture.sizes if mixture is not None else [len(rows)]
            self.curriculum = Curriculum(sampler, sizes, seed=seed)

    @property
    def first_row(self) -> Row:
        """Of the data as it was given."""
        with boundary(self._owner):
            return self._rows[0]

    def first_rows(self, most: int) -> list[Row]:
        """Of the data as it was given."""
        with boundary(self._owner):
            return [self._rows[number] for number in range(min(most, len(self._rows)))]

    def next_batch(self) -> list[Row]:
        positions = range(self._position, self._position + self._batch_size)
        numbers = [self._order.row_at(position) for position in positions]
        if self.curriculum is not None:
            numbers = self.curriculum.draw(self._position // self._batch_size + 1, numbers)
        batch = self.rows_at(numbers)
        for number, row in zip(numbers, batch, strict=True):
            if self._max_tokens is not None:
                require_size(row, f"row {number} of {self._owner}", self._max_tokens)
        self._position += self._batch_size
        return batch

    def rows_at(self, numbers: Sequence[int]) -> list[Row]:
        """Rows by number, of the data as it was given."""
        with boundary(self._owner):
            return [self._rows[number] for number in numbers]

    @property
    def epoch(self) -> int:
        return self._position // len(self._rows)

    def steps(self, epochs: int) -> int:
        """Batches in ``epochs`` passes, at least one."""
        return max(1, len(self._rows) * epochs // self._batch_size)

    def fingerprint(self) -> str:
        """Of the rows, in the order in which they were given."""
        with boundary(self._owner):
            return rows_fingerprint(self._rows)

    def state_dict(self) -> dict[str, Any]:
        state = {"position": self._position, "rows": len(self._rows), "seed": self._seed}
        return state if self._shares is None else {**state, "shares": self._shares}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        mine = self.state_dict()
        for key in self._strict_keys:
            if state.get(key) != mine.get(key):
                raise DataError(
                    f"the checkpoint was made with {key} = {state.get(key)}, the dataset now has {mine.get(key)}",
                    fix="resume with the same dataset and seed, or start a new run",
                )
        self._position = int(state["position"])


def open_data(
    source: DataSource,
    held_out: DataSource | None,
    config: RunConfig,
    batch_size: int,
    *,
    accept_changed_data: bool = False,
) -> tuple[DataModule, HeldOut | None]:
    """Whatever the user calls data as a ``DataModule``, and the rows to validate on.

    Args:
        source: The data of the run.
        held_out: What to validate on: any data, or several by name, ``{"easy": rows, "aime": "aime24"}``. Unset: what
            the config says, else the validation split of ``source``.
        config: Of the run.
        batch_size: Rows per step.
        accept_changed_data: A run is continued with another number of rows than it has had so far.

    Raises:
        UsageError: it is no data, or has no train split.

    Example:
        >>> data, held_out = open_data([{"prompt": "1+1="}], None, config, batch_size=1)  # doctest: +SKIP
    """
    return _data_module(source, config, batch_size, accept_changed_data), _held_out(source, held_out, config)


def _data_module(source: DataSource, config: RunConfig, batch_size: int, accept_changed_data: bool) -> DataModule:
    sampler = config.prompt_sampling if isinstance(config, RolloutRunConfig) else None
    if isinstance(source, DataModule):
        if sampler is not None:
            fix = "pass rows in its place, or leave data.sampling unset"
            raise UsageError("a DataModule chooses its rows itself, and data.sampling asks to choose them", fix=fix)
        return source
    rows = rows_of(source, "train", config.registry)
    if rows is None:
        raise UsageError("the dataset has no train split", fix="check the options of `data:`")
    owner = f"dataset {type(source).__name__}" if isinstance(source, DatasetConfig) else "the dataset"
    if isinstance(rows, Mixture) and rows.rows_per_step not in (None, batch_size):
        raise UsageError(
            f"the parts of the mixture give {rows.rows_per_step} rows per step, and a step takes {batch_size}",
            fix="make the numbers of per_step add up to the rows of a step, or write weights",
        )
    return RowDataModule(
        rows,
        batch_size,
        seed=config.seed,
        shuffle=config.shuffle,
        owner=owner,
        max_tokens=config.policy.max_sequence_tokens,
        accept_changed_data=accept_changed_data,
        sampler=sampler,
    )


def _held_out(source: DataSource, given: DataSource | None, config: RunConfig) -> HeldOut | None:
    chosen = given if given is not None else config.validation.data
    if chosen is None:
        rows = None if isinstance(source, DataModule) else rows_of(source, "validation", config.registry)
    else:
        rows = held_out_rows_of(chosen, config.registry)
    sets = rows.sets if isinstance(rows, RowSets) else {"": rows}
    filled = {name: found for name, found in sets.items() if found}
    return HeldOutRows(filled, config.policy.max_sequence_tokens) if filled else None


def held_out_rows_of(source: DataSource, plugins: Registry | None = None) -> Sequence[Row] | None:
    """The rows of data that is there to validate on: its validation split, else all it has.

    Args:
        source: Any data but a ``DataModule``; or several by name, which become ``RowSets``.
        plugins: Those that a name may mean. Unset: those of this process.

    Raises:
        UsageError: nothing has the name, or the object holds no rows.
    """
    if isinstance(source, DataModule):
        return None
    if isinstance(source, Mapping) and source and not isinstance(source.get("name"), str) and "train" not in source:
        sets = {str(name): held_out_rows_of(part, plugins) for name, part in source.items()}
        return RowSets({name: rows for name, rows in sets.items() if rows is not None})
    found = rows_of(source, "validation", plugins)
    return rows_of(source, "train", plugins) if found is None else found


def rows_of(source: Any, split: str, plugins: Registry | None = None) -> Sequence[Row] | None:
    """The rows of one split of any data source but a ``DataModule``; ``None`` where it has no such split.

    Args:
        source: Any of :data:`DataSource` but a ``DataModule``.
        split: ``train`` or ``validation``.
        plugins: Those that a name may mean. Unset: those of this process.

    Raises:
        UsageError: nothing has the name, or the object holds no rows.
        ConfigError: the options of the dataset are wrong.
    """
    if isinstance(source, str | Path):
        source = named_dataset(source, plugins)
    elif isinstance(source, Mapping) and isinstance(source.get("name"), str):
        options = {key: value for key, value in source.items() if key != "name"}
        source = configured_dataset(source["name"], options, plugins or registry())
    if isinstance(source, DatasetConfig):
        with boundary(f"dataset {type(source).__name__}"):
            return source.build(split)
    if isinstance(source, Mapping):
        return split_of(source, split)
    return as_rows(source) if split == "train" else None


def named_dataset(name: str | Path, plugins: Registry | None = None) -> DatasetConfig:
    """The dataset that a text or path means: an installed one, else what an installed package makes of it.

    Raises:
        UsageError: it is none; names what comes closest.
    """
    plugins = plugins or registry()
    known = [entry.name for entry in plugins.index.of_kind("datasets")]
    if isinstance(name, str) and name.rpartition(":")[2] in known:
        return configured_dataset(name, {}, plugins)
    find_dataset = FIND_DATASET.filled()
    if find_dataset is not None:
        with boundary("find_dataset"):
            return find_dataset(name, known)
    raise UsageError(
        f"no dataset {shown(str(name))} is installed (there are {', '.join(known) or 'none'})",
        fix=did_you_mean(str(name), known) or "pip install nemorl-tasks, which reads files and the hub",
    )


def configured_dataset(name: str, options: Mapping[str, Any], plugins: Registry) -> DatasetConfig:
    """The config of an installed dataset, or of one that a plugin knows by this name, with these options.

    Raises:
        PluginNotFoundError: no such dataset is installed; says what to install.
        UsageError: a module that it needs is missing; or a preset is called almost so.
        ConfigError: every option that is wrong.
    """
    spelled = dict(Component("datasets").spelled({"name": name, **options}, plugins))
    name = spelled.pop("name")
    config_class = plugins.load("datasets", name)
    problem = missing_modules("datasets", name, config_class)
    if problem is not None:
        raise UsageError(problem.message, fix=problem.fix)
    loaded: DatasetConfig = validate(config_class, spelled, source=f"dataset {name}")
    return loaded
