"""A preset: one published dataset as a YAML file. Where its rows are, and how they become nemorl's.

The files of this package are in ``presets/``; users write their own the same way.
:mod:`nemorl_tasks.datasets.shapes` reads the part about rows,
:mod:`nemorl_tasks.datasets.preset` makes a dataset of the whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal

from nemorl.base.text.mappings import read_source
from nemorl.base.text.reading import expanded, shown
from nemorl.base.text.suggest import did_you_mean
from nemorl.config import Config
from nemorl.config.load import validate
from nemorl.errors import ConfigIssue, UsageError
from pydantic import Field

FOLDER = Path(__file__).parent / "presets"
"""The presets of this package, one file each."""
SUFFIXES = (".yaml", ".yml", ".json")
"""Files that may hold a preset."""
TASKS = ("math", "multiple choice", "question answering", "images", "audio", "chat", "preference", "text")


class Choices(Config):
    """Options of a multiple-choice question. Their letters are given in the order in which they are shown."""

    options: str | tuple[str, ...]
    """One column with a list of texts, or a column per option; empty ones are left out."""
    correct: int | str
    """Number of the right option, from 0; or the column that holds its number or letter."""
    shuffle: bool = False
    """Show them in an order of their own for each row, which follows from the dataset's ``seed``."""


class Pair(Config):
    """Two responses and a number that says which is better."""

    first: str
    """Column of one response."""
    second: str
    """Column of the other."""
    preference: str
    """Column of the number: below 0 the first is better, above 0 the second. Leave out ties with ``drop``."""


class Ranked(Config):
    """Any number of ranked responses to one prompt, made into pairs."""

    completions: str
    """Column with a list of mappings."""
    response: str = "completion"
    """Field of each: text, or a list of messages whose last one is the response."""
    rank: str = "rank"
    """Field of each: its rank. Equal ranks make no pair."""
    lower_is_better: bool = True
    """Direction of the ranks. Turn it off for scores."""


class Turns(Config):
    """A conversation whose messages have other names for role and text."""

    column: str
    """Column with the list of messages."""
    role: str = "from"
    """Field of each message that says who speaks."""
    content: str = "value"
    """Field of each message that holds its text."""
    roles: dict[str, str] = Field(default_factory=lambda: {"human": "user", "gpt": "assistant", "agent": "assistant"})
    """Their names for roles -> ``system``, ``user``, ``assistant``; those three are known."""


class Threads(Config):
    """A tree of replies. Each way from its root to a last reply is one conversation."""

    root: str
    """Column with the first message."""
    text: str = "text"
    """Field of a message that holds its text."""
    role: str = "role"
    """Field of a message that says who speaks."""
    replies: str = "replies"
    """Field of a message with the list of its replies."""
    roles: dict[str, str] = Field(default_factory=lambda: {"prompter": "user"})
    """Their names for roles -> ``user``, ``assistant``."""


class ListedOptions(Config):
    """Options in the same text as their question, one to a line: they become ``choices``, a list of texts, and leave
    the question. Letters before them and before the answer are left out (``B. a bell``)."""

    column: str
    """Column with both."""
    after: str
    """Text between the question and the first option."""
    answer: str
    """Column with the right option."""


class MediaColumn(Config):
    """Images, sounds or videos of a row, and where they go in its prompt."""

    kind: Literal["image", "audio", "video"]
    """Of which they are."""
    column: str
    """Column with one of them or a list: bytes, what the hub holds them as, or the names of files. Text filled from
    several columns is such a name: ``videos/{id}.mp4``."""
    marker: str | None = None
    """Text of the prompt in whose place they stand, one after the other: ``<image>``, which ``<image_1>`` is as well.
    Where the prompt has none of it, and where this is unset, they go before the text."""


class Region(Config):
    """A phrase for a part of the row's image. The answer is its box in thousandths of width and height:
    ``[x1, y1, x2, y2]``."""

    phrases: str
    """Column with a list of phrases. The longest is asked for, as ``phrase``: it tells the most."""
    box: str
    """Column with left, upper, right and lower edge in pixels."""


class Preset(Config):
    """One dataset: where it is, how its columns become rows, what it is for, and under which terms."""

    name: str
    """As its authors write it. Case, dashes, dots and underscores do not matter where it is used."""
    aliases: tuple[str, ...] = ()
    """Other names."""
    variants: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Names of variants -> the fields in which they differ, e.g. ``gpqa_diamond: {subset: gpqa_diamond}``."""
    task: Literal[TASKS]  # type: ignore[valid-type]
    """The task that its rows are for."""
    summary: str
    """One line about it."""

    hub: str | None = None
    """Name on the Hugging Face hub. Unset: whoever uses the preset gives the ``path`` of a file."""
    files: tuple[str, ...] = ()
    """Files of that repository to read instead of its splits."""
    subset: str | tuple[str, ...] | None = None
    """Configuration on the hub, or several that are joined."""
    train: str | None = None
    """Split to train on. Unset: it is there to be evaluated on."""
    validation: str | None = None
    """Split to validate on."""
    validation_preset: str | None = None
    """Another preset that this one is validated on."""
    validation_fraction: float = Field(0.0, ge=0, lt=1)
    """Part of the training split to hold out, where there is nothing else to validate on."""
    rows: dict[str, int] = Field(default_factory=dict)
    """Published number of rows of each split."""

    columns: dict[str, str] = Field(default_factory=dict)
    """Part of a row (``prompt``, ``answer``, ``response``, ``messages``, ``chosen``, ``rejected``, ``system``, …) ->
    its column. Dots lead into lists and mappings, ``answers.text.0``; text with braces is filled, ``Q: {question}``;
    the empty name is the empty text."""
    answer_after: str | None = None
    """Text before the answer in its column: only what follows it is the answer."""
    answer_boxed: bool = False
    """The answer is what the last ``\\boxed{…}`` of its column holds."""
    answer_tag: str | None = None
    """The answer, and the response, is what this element of its column holds: ``answer`` for ``<answer>3</answer>``;
    all of it where there is no such element."""
    listed: ListedOptions | None = None
    """The options of a question stand behind it."""
    replaced: dict[str, dict[str, str]] = Field(default_factory=dict)
    """Column -> text of it -> what stands there instead."""
    lines: tuple[str, ...] = ()
    """Columns whose list of texts becomes one text of as many lines."""
    prompt_template: str | None = None
    """Text of the prompt, with parts of the row in braces: ``{prompt}``, or ``{question}``, ``{options}`` and
    ``{letters}`` of a multiple-choice question."""
    chat: bool = True
    """Ask text prompts as a chat message of the user."""
    choices: Choices | None = None
    """The row is a multiple-choice question, its prompt so far the question."""
    pair: Pair | None = None
    """The row holds two responses, one of them better: ``chosen``, which is also ``response`` and ``answer``."""
    ranked: Ranked | None = None
    """The row holds ranked responses."""
    turns: Turns | None = None
    """The row holds a conversation under other names."""
    threads: Threads | None = None
    """The row holds a tree of conversations."""
    media: tuple[MediaColumn, ...] = ()
    """Images, sounds and videos, in the order in which they stand before the text. The prompt's last message then has a
    list of parts for its content, ``{"type": "image", "image": …}`` and ``{"type": "text", "text": …}``."""
    media_files: str | None = None
    """The place of the files that the rows name, in a few words for whoever is to get them. The dataset's
    ``media_folder`` says where they are on this machine. Unset: rows hold the media themselves."""
    region: Region | None = None
    """The row asks for a box around a part of its image."""
    keep: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    """Column -> values, compared without case: rows with others are left out."""
    drop: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    """Column -> values that leave a row out. Nothing counts as the empty text."""

    licence: str
    """Its terms, in one line."""
    homepage: str
    """Where it is described."""
    citation: str = ""
    """Whom to cite."""

    def problems(self) -> Iterator[ConfigIssue]:
        yield from super().problems()
        if self.hub is None and (self.files or self.subset):
            yield ConfigIssue("hub", "files and subset belong to a repository", "name it: hub: org/name")
        if self.validation_preset is not None and (self.validation or self.validation_fraction):
            yield ConfigIssue("validation_preset", "the data to validate on is given twice", "keep one of them")
        if self.media and "prompt" not in self.columns:
            yield ConfigIssue("media", "there is no prompt that they would be part of", "map it: columns: {prompt: …}")
        if self.media and not self.chat:
            yield ConfigIssue("chat", "images and sounds are parts of a chat message", "leave chat out")
        if self.region is not None and [column.kind for column in self.media].count("image") != 1:
            yield ConfigIssue(
                "region", "there is no image that it would be a part of", "name one: media: [{kind: image, …}]"
            )
        if self.answer_after and self.answer_boxed:
            yield ConfigIssue("answer_boxed", "answer_after is set as well", "keep one of them")

    @property
    def other_names(self) -> tuple[str, ...]:
        """Aliases and variants."""
        return (*self.aliases, *self.variants)

    def variant(self, name: str) -> Preset:
        """This preset under one of its names: a variant with its own fields."""
        for other, changes in self.variants.items():
            if folded(other) == folded(name):
                fields = {key: value for key, value in dict(self).items() if key != "variants"}
                return validate(Preset, {**fields, "aliases": (), **changes, "name": other}, source=f"preset {other}")
        return self


def folded(name: str) -> str:
    """``OpenMathInstruct-2``, ``openmathinstruct2`` and ``open_math_instruct_2`` are one name."""
    return re.sub(r"[-_. ]", "", name.casefold())


@cache
def presets() -> Mapping[str, Preset]:
    """The presets of this package by their own names."""
    found = (read_preset(path) for path in sorted(FOLDER.glob("*.yaml")))
    return {preset.name: preset for preset in found}


@cache
def _by_folded_name() -> Mapping[str, Preset]:
    return {folded(name): preset for preset in presets().values() for name in (preset.name, *preset.other_names)}


def known_names() -> list[str]:
    """Every name of every preset of this package."""
    return [name for preset in presets().values() for name in (preset.name, *preset.other_names)]


def has_preset(name: str) -> bool:
    """Whether a preset of this package has the name."""
    return folded(name) in _by_folded_name()


def is_preset_file(name: str) -> bool:
    """Whether the text is the path of a file that may be a preset: ``./mine.yaml``."""
    return Path(name).suffix in SUFFIXES[:2] and expanded(name).is_file()


def find_preset(name: str) -> Preset:
    """The preset of a name, or in a file.

    Raises:
        UsageError: there is none; names the closest.
        ConfigError: the file is no preset; says what is wrong.

    Example:
        >>> find_preset("GSM-8k").hub
        'openai/gsm8k'
    """
    found = _by_folded_name().get(folded(name))
    if found is not None:
        return found.variant(name)
    if Path(name).suffix in SUFFIXES:
        return read_preset(expanded(name))
    raise UsageError(
        f"no dataset is called {shown(name)}",
        fix=closest(name)
        or "`nemorl datasets` lists them; for one of your own, give the path of a preset: ./mine.yaml",
    )


def closest(name: str) -> str | None:
    """``"Did you mean 'GSM8K'?"``, or ``None`` when no preset is called anything like it."""
    names = {folded(known): known for known in known_names()}
    near = did_you_mean(folded(name), names)
    return f"Did you mean {names[near.split(chr(39))[1]]!r}?" if near else None


def read_preset(path: Path) -> Preset:
    """The preset in a file.

    Raises:
        UsageError: there is no such file.
        ConfigError: it is no preset; says what is wrong.
    """
    if not path.is_file():
        near = did_you_mean(path.name, [other.name for other in path.parent.glob("*") if other.suffix in SUFFIXES])
        raise UsageError(f"there is no preset file {path}", fix=near or "check the path")
    return validate(Preset, read_source(path), source=str(path))


def listed(task: str | None = None) -> list[Preset]:
    """All presets by task and name, or those of one task."""
    found = [preset for preset in presets().values() if task in (None, preset.task)]
    return sorted(found, key=lambda preset: (TASKS.index(preset.task), preset.name.casefold()))
