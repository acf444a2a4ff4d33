"""The options of the ``huggingface`` and ``file`` datasets. Libraries that read them are imported with rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from nemorl.config import Config, DatasetFile, DatasetName
from nemorl.errors import ConfigIssue, DataError
from nemorl.plugins.kinds import DatasetConfig
from pydantic import Field

from nemorl_tasks.datasets import files, hub
from nemorl_tasks.datasets.mapping import ColumnMapping
from nemorl_tasks.datasets.rows import select_rows

if TYPE_CHECKING:
    from nemorl.types import Row


class _Table(Config):
    """How the columns of a table become rows. Unset columns are found by their usual names; others are kept."""

    prompt_column: str | None = None
    """Column with the task: text, or a list of chat messages. Unset: ``prompt``, ``question`` or ``problem``."""
    prompt_template: str | None = None
    """Text of the prompt with columns in braces, ``"Q: {question}"``, in place of ``prompt_column``. Braces around
    anything that is not a name stay, as in ``\\boxed{}``; ``{{name}}`` is a literal ``{name}``."""
    answer_column: str | None = None
    """Column with the ground truth for graders. Unset: ``answer`` or ``expected_answer``. Numbers become text."""
    response_column: str | None = None
    """Column with the text to imitate, for SFT. Unset: ``response`` or ``completion``."""
    messages_column: str | None = None
    """Column with a whole conversation, for SFT on chats. Unset: ``messages``."""
    chosen_column: str | None = None
    """Column with the preferred response: text, or a conversation that ends in it. Unset: ``chosen``."""
    rejected_column: str | None = None
    """Column with the other response. Unset: ``rejected``."""
    chat: bool = False
    """Ask text prompts as a chat message of the user, through the model's chat template. Turn it on for
    instruction-tuned models."""
    system_prompt: str | None = None
    """System message before every conversation that has none; implies ``chat``."""
    max_rows: int | None = Field(None, ge=1)
    """Keep the first rows of each split only: a quick try on a big dataset."""
    validation_fraction: float = Field(0.0, ge=0, lt=1)
    """Part of the rows to hold out when the data has no validation split of its own. 0: hold out none."""
    seed: int = Field(0, ge=0)
    """Chooses the held-out rows."""

    def mapping(self) -> ColumnMapping:
        """The column options alone: what the rows need, and nothing about where they are."""
        return ColumnMapping(
            columns={key: getattr(self, f"{key}_column") for key in ColumnMapping.KEYS},
            prompt_template=self.prompt_template,
            chat=self.chat or self.system_prompt is not None,
            system_prompt=self.system_prompt,
        )

    def problems(self) -> Iterator[ConfigIssue]:
        yield from super().problems()
        if self.prompt_column and self.prompt_template is not None:
            yield ConfigIssue("prompt_template", "prompt_column is set as well", "keep one of them")


class FileConfig(_Table, DatasetConfig):
    """Rows from a local file: JSON Lines, JSON, Parquet, CSV or TSV, told apart by the file's extension."""

    summary: ClassVar[str] = "local JSONL, JSON, Parquet, CSV and TSV files"
    requires_modules: ClassVar[tuple[str, ...]] = ("datasets", "pyarrow")
    install_hint: ClassVar[str] = "pip install nemorl-tasks"

    path: DatasetFile
    """The training file, relative to the working directory."""
    validation_path: DatasetFile | None = None
    """The validation file. Unset: none, or a ``validation_fraction`` of ``path``."""

    def problems(self) -> Iterator[ConfigIssue]:
        yield from super().problems()
        if self.validation_path is not None and self.validation_fraction:
            yield ConfigIssue("validation_fraction", "validation_path is set as well", "keep one of them")
        for field in ("path", "validation_path"):
            path: Path | None = getattr(self, field)
            if path is None:
                continue
            try:
                row = files.first_row(path)
            except DataError as error:
                yield ConfigIssue(field, error.message, error.fix, here=not path.exists())
            else:
                yield from self.mapping().problems(row, where=field, source=str(path))

    def build(self, split: str) -> Sequence[Row] | None:
        if split == "validation" and self.validation_path is not None:
            return select_rows(files.read(self.validation_path), self, split, fraction=0, source=self.validation_path)
        if split == "train" or (split == "validation" and self.validation_fraction):
            rows = files.read(self.path)
            return select_rows(rows, self, split, fraction=self.validation_fraction, source=self.path)
        return None

    def first_row(self) -> Row | None:
        return self.mapping().convert(files.first_row(self.path), number=0, source=str(self.path))


class HuggingFaceConfig(_Table, DatasetConfig):
    """Rows from a dataset of the Hugging Face hub, or from a local folder laid out like one."""

    summary: ClassVar[str] = "any dataset of the Hugging Face hub, columns mapped by name"
    requires_modules: ClassVar[tuple[str, ...]] = ("datasets",)
    install_hint: ClassVar[str] = "pip install nemorl-tasks"

    path: DatasetName = Field(min_length=1)
    """Name on the hub, e.g. ``openai/gsm8k``, or a local folder."""
    config_name: str | None = None
    """Configuration (subset) of a dataset that has several, e.g. ``main``."""
    revision: str | None = None
    """Branch, tag or commit. Set a commit to make the run repeatable."""
    train_split: str = "train"
    """Split to train on. Slices work: ``train[:10%]``."""
    validation_split: str | None = None
    """Split to validate on, e.g. ``test``. Unset: none, or a ``validation_fraction`` of the training split."""

    def problems(self) -> Iterator[ConfigIssue]:
        yield from super().problems()
        if self.validation_split is not None and self.validation_fraction:
            yield ConfigIssue("validation_fraction", "validation_split is set as well", "keep one of them")
        if self.validation_split == self.train_split:
            message = f"{self.validation_split!r} is the training split: its accuracy would say nothing"
            yield ConfigIssue("validation_split", message, "name another split, or set validation_fraction instead")
        if Path(self.path).is_file():
            fix = f"use data: {{name: file, path: {self.path}}}"
            yield ConfigIssue("path", f"{self.path} is a file, not a dataset of the hub", fix)

    def build(self, split: str) -> Sequence[Row] | None:
        if split == "validation" and self.validation_split is not None:
            return select_rows(self._load(self.validation_split), self, split, fraction=0, source=self.path)
        if split == "train" or (split == "validation" and self.validation_fraction):
            rows = self._load(self.train_split)
            return select_rows(rows, self, split, fraction=self.validation_fraction, source=self.path)
        return None

    def _load(self, split: str) -> Sequence[Row]:
        table: Sequence[Row] = hub.load_split(self.path, self.config_name, split, self.revision)
        return table

    def first_row(self) -> Row | None:
        return None  # checking a config downloads nothing
