"""Datasets made of others: ``mixture`` to train on several, ``sets`` to validate on several, each for itself."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from nemorl.base.text.reading import shown
from nemorl.config import Config
from nemorl.config.component import Component
from nemorl.errors import ConfigIssue, DataError, UsageError
from nemorl.plugins.kinds import DatasetConfig
from nemorl_rl.data.mixtures import Joined, Mixture, RowSets, shares
from nemorl_rl.data.rows import held_out_rows_of
from pydantic import Field, WithJsonSchema

if TYPE_CHECKING:
    from nemorl.types import Row

# A part may be a mixture itself, so that its schema cannot be spelled out in full: it would never end.
_SCHEMA: dict[str, Any] = {
    "description": "Name of a dataset, or a mapping with `name` and its options.",
    "anyOf": [
        {"type": "string"},
        {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
    ],
}
AnyDataset = Annotated[DatasetConfig, Component("datasets"), WithJsonSchema(_SCHEMA)]


class MixturePart(Config):
    """One dataset of several."""

    data: AnyDataset
    """Its name, or a mapping with ``name`` and its options."""
    weight: float | None = Field(None, gt=0, allow_inf_nan=False)
    """Its share of the rows, in proportion to the other weights. Unset everywhere: every row of every part once per
    epoch, shuffled together."""
    per_step: int | None = Field(None, ge=1)
    """Rows of each step that are its own; together they must be the rows of a step. In place of weights."""
    repeat: int = Field(1, ge=1, le=100_000)
    """Its rows occur so often in an epoch."""


class MixtureConfig(DatasetConfig):
    """Several datasets, joined or in given proportions."""

    summary: ClassVar[str] = "several datasets, joined or in given proportions"

    parts: tuple[MixturePart, ...]
    """The datasets."""
    seed: int = Field(0, ge=0)
    """Another one gives another order within each part, for the same seed of the run."""

    def problems(self) -> Iterator[ConfigIssue]:
        yield from super().problems()
        if not self.parts:
            yield ConfigIssue("parts", "there are none", "name at least one: parts: [{data: …}]")
            return
        for field in ("weight", "per_step"):
            given = [getattr(part, field) is not None for part in self.parts]
            if any(given) and not all(given):
                path = f"parts.{given.index(False)}.{field}"
                yield ConfigIssue(
                    path, "other parts have one, this part has none", "give one to every part, or to none"
                )
        if any(part.weight is not None and part.per_step is not None for part in self.parts):
            yield ConfigIssue("parts", "parts have weights and rows per step", "keep one of them")
        elif all(part.weight is not None for part in self.parts):
            try:
                shares([part.weight for part in self.parts if part.weight is not None])
            except UsageError as error:
                yield ConfigIssue("parts", error.message, error.fix)

    def build(self, split: str) -> Sequence[Row] | None:
        built = [part.data.build(split) for part in self.parts]
        if split != "train":
            found = [rows for rows in built if rows]
            return Joined(found) if found else None
        tables = [
            rows if part.repeat == 1 else Joined([rows] * part.repeat)
            for rows, part in zip(self._all(built), self.parts, strict=True)
        ]
        weights = [part.weight or part.per_step for part in self.parts]
        if None in weights:
            return Joined(tables)
        per_step = sum(part.per_step or 0 for part in self.parts) or None
        return Mixture(tables, [weight for weight in weights if weight], seed=self.seed, rows_per_step=per_step)

    def first_row(self) -> Row | None:
        return self.parts[0].data.first_row()

    def _all(self, built: Sequence[Sequence[Row] | None]) -> Iterator[Sequence[Row]]:
        for number, rows in enumerate(built):
            if not rows:
                raise DataError(
                    f"part {number} of the mixture ({type(self.parts[number].data).__name__}) has no rows to train on",
                    fix="check its options; of a dataset that is there to validate on, name the split: split: …",
                )
            yield rows


class SetsConfig(DatasetConfig):
    """Several datasets to validate on. Each has metrics of its own: ``validation/aime24/accuracy``. To train on are the
    training rows of those that have a validation split."""

    summary: ClassVar[str] = "several datasets to validate on, each with metrics of its own"

    sets: dict[str, AnyDataset] = Field(min_length=1)
    """Name in the metrics -> dataset. Its validation split is used, or all it has."""

    def problems(self) -> Iterator[ConfigIssue]:
        yield from super().problems()
        for name in self.sets:
            if not re.fullmatch(r"[\w.-]+", name):
                fix = "name it with letters, digits, dots, dashes and underscores"
                yield ConfigIssue("sets", f"{shown(name)} cannot be a part of a metric's name", fix)

    def build(self, split: str) -> Sequence[Row] | None:
        if split == "train":
            return self._training_rows()
        if split != "validation":
            return None
        found: dict[str, Sequence[Row]] = {}
        for name, data in self.sets.items():
            rows = held_out_rows_of(data)
            if not rows:
                raise DataError(f"the validation set {name} has no rows", fix="check its path, split and filters")
            found[name] = rows
        return RowSets(found)

    def _training_rows(self) -> Sequence[Row] | None:
        """Those of the sets that have others to validate on: of the rest all rows are held out."""
        tables = [rows for data in self.sets.values() if data.build("validation") and (rows := data.build("train"))]
        return Joined(tables) if tables else None

    def first_row(self) -> Row | None:
        return None
