"""The ``preset`` dataset: a published dataset by its name, or by a preset file of the user's own.

``data: gsm8k`` and ``data: {name: gsm8k, max_rows: 100}`` mean it too. Checking a config reads the preset alone; the
rows, and the library that gets them, are asked for in ``build()``.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from nemorl.base.text.naming import Named
from nemorl.config import DatasetName
from nemorl.errors import ConfigError, ConfigIssue, DataError, NemorlError
from nemorl.plugins.kinds import DatasetConfig
from pydantic import Field

from nemorl_tasks.datasets.expanding import expand, selected
from nemorl_tasks.datasets.mapping import ColumnMapping
from nemorl_tasks.datasets.preset_file import Preset, find_preset
from nemorl_tasks.datasets.rows import MappedRows, hold_out, local_file
from nemorl_tasks.datasets.shapes import PresetMapping
from nemorl_tasks.datasets.sources import first_row, read_table, undecoded

if TYPE_CHECKING:
    from nemorl.types import Row


class PresetConfig(DatasetConfig):
    """A published dataset by name: ``nemorl datasets`` lists them."""

    summary: ClassVar[str] = "published datasets by name, such as GSM8K (`nemorl datasets` lists them)"
    install_hint: ClassVar[str] = "pip install nemorl-tasks"

    preset: DatasetName = Field(min_length=1)
    """Name of a dataset, e.g. ``GSM8K``, or path of a preset file. Case, dashes and underscores do not matter."""
    path: DatasetName | None = None
    """Read the rows from here: a file, a folder with a file per split (``train.jsonl``), a pattern of files
    (``shards/*.arrow``), or another repository of the same columns. Unset: the preset's repository on the hub."""
    subset: str | None = None
    """Configuration of the repository. Unset: the preset's."""
    revision: str | None = None
    """Branch, tag or commit of the repository. Set a commit to make the run repeatable."""
    split: str | None = None
    """Use this split alone, to train or to validate on, whatever the preset says."""
    validation_split: str | None = None
    """Split to validate on. Unset: the preset's; with ``split`` none."""
    validation_fraction: float | None = Field(None, ge=0, lt=1)
    """Part of the training rows to hold out, where nothing else is there to validate on. Unset: the preset's."""
    columns: dict[str, str] = Field(default_factory=dict)
    """Part of a row (``prompt``, ``answer``, ``response``, …) -> its column, where the preset's does not fit."""
    prompt_template: str | None = None
    """Text of the prompt, with the task in braces: ``"{prompt} End with the number."``; ``{question}``, ``{options}``
    and ``{letters}`` for multiple choice. Unset: the preset's."""
    system_prompt: str | None = None
    """System message of every conversation that has none; implies ``chat``."""
    chat: bool | None = None
    """Ask text prompts as a chat message of the user. Unset: as the preset says, mostly true."""
    pairs: Literal["best_worst", "neighbours", "all"] = "best_worst"
    """Which pairs ranked responses make: the best and the worst, each rank and the next, or any two of them."""
    media_folder: DatasetName | None = None
    """Folder with the images, sounds and videos that rows name by file, where the dataset has them in files of their
    own: its archives unpacked, or a copy of its repository (``hf download … --local-dir``)."""
    characters_per_row: int | None = Field(None, ge=1)
    """Plain text: join rows, with a line break between them, until they have so many characters."""
    max_rows: int | None = Field(None, ge=1)
    """Keep the first rows of each split only."""
    repeat: int = Field(1, ge=1, le=100_000)
    """Rows occur so often in an epoch: 16 asks each of a few questions 16 times."""
    seed: int = Field(0, ge=0)
    """Chooses the held-out rows, and the order of options where a preset shuffles them."""

    def named_values(self, path: str = "") -> Iterator[Named]:
        yield from super().named_values(path)
        spec = self.spec
        read = [spec] if self.path is None else []
        if spec.validation_preset is not None:
            read.append(find_preset(spec.validation_preset))
        for preset in read:
            if preset.hub is not None:
                yield Named(f"{path}.preset" if path else "preset", "dataset", preset.hub)

    def problems(self) -> Iterator[ConfigIssue]:
        yield from super().problems()
        try:
            spec = self.spec
        except ConfigError as error:
            said = "; ".join(f"{issue.path or 'the file'}: {issue.message} ({issue.fix})" for issue in error.problems)
            yield ConfigIssue("preset", f"{self.preset} is no preset: {said}", "correct the file")
            return
        except NemorlError as error:
            yield ConfigIssue("preset", error.message, error.fix)
            return
        if spec.hub is None and self.path is None:
            yield ConfigIssue("path", f"{spec.name} reads files of your own", "name one: path: rows.jsonl")
        if self.validation_split is not None and self.validation_fraction:
            yield ConfigIssue("validation_fraction", "validation_split is set as well", "keep one of them")
        if spec.media_files is not None and self.media_folder is None:
            message = f"the rows of {spec.name} name files: {spec.media_files}"
            yield ConfigIssue("media_folder", message, "get them, and name their folder")
        if self.characters_per_row is not None and "response" not in spec.columns:
            yield ConfigIssue("characters_per_row", f"rows of {spec.name} hold no text to be joined", "leave it out")
        if spec.media and self.chat is False:
            yield ConfigIssue("chat", "images and sounds are parts of a chat message", "leave it out")
        if self.split is not None and self.split == self.validation_split:
            message = f"{self.split!r} is the split to train on: its accuracy would say nothing"
            yield ConfigIssue("validation_split", message, "name another split, or set validation_fraction instead")
        yield from self._row_problems()

    @property
    def spec(self) -> Preset:
        """The preset, with what the options change of it.

        Raises:
            UsageError: no preset has the name.
            ConfigError: its file is not in order.
        """
        preset = find_preset(self.preset)
        changes: dict[str, Any] = {"columns": {**preset.columns, **self.columns}}
        if self.subset is not None:
            changes["subset"] = self.subset
        return preset.model_copy(update=changes)

    def mapping(self) -> PresetMapping:
        """How rows become nemorl's."""
        spec = self.spec
        chat = (spec.chat if self.chat is None else self.chat) or self.system_prompt is not None
        finish = ColumnMapping({}, chat=chat, system_prompt=self.system_prompt)
        return PresetMapping(spec, finish, self.prompt_template, self.seed, self.media_folder)

    def build(self, split: str) -> Sequence[Row] | None:
        spec = self.spec
        if split not in ("train", "validation"):
            return None
        if split == "validation" and (other := self._other_preset(spec)) is not None:
            return other.build("validation")
        train = self.split or spec.train
        held_out = self.validation_split or (spec.validation if self.split is None else None)
        if split == "validation" and held_out is not None:
            return self._rows(spec, held_out, None)
        if train is None:
            return None
        fraction = 0.0 if held_out is not None or self._other_preset(spec) is not None else self._fraction(spec)
        if split == "validation":
            return self._rows(spec, train, ("validation", fraction)) if fraction else None
        return self._rows(spec, train, ("train", fraction) if fraction else None)

    def first_row(self) -> Row | None:
        row = first_row(self.path) if self.path is not None else None
        return None if row is None else self._first(row)

    def _other_preset(self, spec: Preset) -> PresetConfig | None:
        """The dataset that this one is validated on, if it has no rows of its own for that."""
        if spec.validation_preset is None or self.split or self.validation_split or self.validation_fraction:
            return None
        asked = {name: getattr(self, name) for name in ("prompt_template", "system_prompt", "chat", "media_folder")}
        return PresetConfig(preset=spec.validation_preset, **asked)

    def _fraction(self, spec: Preset) -> float:
        return spec.validation_fraction if self.validation_fraction is None else self.validation_fraction

    def _rows(self, spec: Preset, name: str, part: tuple[str, float] | None) -> MappedRows:
        source = f"{spec.name} ({name})"
        table = read_table(spec, self.path, name, self.revision)
        table = expand(undecoded(table) if spec.media else table, spec, self, source)
        numbers = selected(table, spec, source)
        if part is not None:
            train, validation = hold_out(len(numbers), part[1], self.seed)
            chosen = validation if part[0] == "validation" else train
            numbers = array("q", (numbers[number] for number in chosen))
        numbers = numbers if self.max_rows is None else numbers[: self.max_rows]
        if not len(numbers):
            raise DataError(f"{source} has no rows left", fix="choose another split, or hold out less")
        repeated = array("q", numbers) * self.repeat if self.repeat > 1 else numbers
        rows = MappedRows(table, repeated, self.mapping(), source, local_file(self.path))
        rows[0]
        return rows

    def _row_problems(self) -> Iterator[ConfigIssue]:
        """Problems of the first row, where looking at it costs nothing."""
        try:
            row = first_row(self.path) if self.path is not None else None
            if row is not None:
                self._first(row)
        except DataError as error:
            yield ConfigIssue("path", error.message, error.fix)

    def _first(self, row: Mapping[str, Any]) -> Row | None:
        spec, source = self.spec, str(self.path)
        expanded = expand([row], spec, self, source)
        if not (numbers := selected(expanded, spec, source)):
            return None  # the next one may be kept
        return self.mapping().convert(expanded[numbers[0]], number=numbers[0], source=source)
