"""Sections that plugins add to a report: plain data here, drawn and escaped by the report.

A plugin of the group ``nemorl.report_sections`` builds a function of the run's records:

>>> def dropped_groups(run: RunData) -> Section | None:
...     values = run.metrics.get("train/dropped_groups")
...     return Section("Dropped groups", [Curves("Groups per step", {"dropped": values})]) if values else None

A run names the ones it wants in ``plugins.report_sections``; those whose config is ``unasked`` come after them by
themselves. One that fails says so in its place; the report goes on.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from nemorl.base.process.deadlines import deadline
from nemorl.config.load import validate
from nemorl.config.plugin_lists import PluginsConfig
from nemorl.errors import NemorlError, PluginError, boundary
from nemorl.plugins.kinds import ReportSectionConfig
from nemorl.plugins.registry import Registry

from nemorl_cli.report.run_data import RunData

Cell = str | float | None


@dataclass(frozen=True)
class Text:
    """A paragraph.

    Example:
        >>> Text("Nothing was dropped.").text
        'Nothing was dropped.'
    """

    text: str


@dataclass(frozen=True)
class Table:
    """Rows under column titles. Numbers are shown with four significant digits.

    Example:
        >>> Table(["prompt", "reward"], [["1+1=", 0.5]]).rows[0][1]
        0.5
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]


@dataclass(frozen=True)
class Curves:
    """One chart: curves over steps.

    Example:
        >>> Curves("Reward", {"reward": {1: 0.25, 2: 0.5}}).series["reward"][2]
        0.5
    """

    title: str
    series: Mapping[str, Mapping[int, float]]
    """Label -> step -> value."""
    hint: str = ""
    """Unit or meaning, in a few words."""
    smooth: bool = False
    """Draw a moving average over the faint raw curve."""


@dataclass(frozen=True)
class Section:
    """A title and what stands under it, block by block.

    Example:
        >>> Section("Note", [Text("Nothing was dropped.")]).title
        'Note'
    """

    title: str
    blocks: Sequence[Text | Table | Curves]


class TranscriptSection(ABC):
    """A section that also shows an environment's responses in its own way, above their turns.

    Example:
        >>> class Board(TranscriptSection):
        ...     def transcript(self, record):
        ...         return [Text(record["response"].upper())]
    """

    def __call__(self, run: RunData) -> Section | None:
        """The section itself; by default there is none."""
        return None

    @abstractmethod
    def transcript(self, record: Mapping[str, Any]) -> Sequence[Text | Table | Curves] | None:
        """Content above the turns of a response.

        Args:
            record: One rollout record, with ``turns``; docs/records.md has its columns.

        Returns:
            Blocks, which the page draws and escapes; ``None``: it is none of this environment's.
        """


LIMIT_S = 600.0
"""Longest time that a section may take."""

SectionSource = Callable[[RunData], Section | None]
"""The function that a ``ReportSectionConfig`` builds; it gives ``None`` where the run has nothing to show."""


def sections_of(run: RunData, registry: Registry, failed: Callable[[NemorlError], None]) -> Iterator[Section]:
    """The sections that the run's config asks for, in its order, and those that come unasked. ``failed`` is told of one
    that raises."""
    for given in _wanted(run, registry):
        try:
            section = _made(run, *_source(registry, given))
        except NemorlError as error:
            failed(error)
            section = Section(f"Section {_name(given)}", [Text(str(error))])
        if section is not None:
            yield section


def transcripts_of(run: RunData, registry: Registry) -> list[tuple[str, TranscriptSection]]:
    """(owner, section) of the same, where they show transcripts. One that cannot be built is left out:
    ``sections_of`` says why."""
    found = []
    for given in _wanted(run, registry):
        with suppress(NemorlError):
            owner, source = _source(registry, given)
            if isinstance(source, TranscriptSection):
                found.append((owner, source))
    return found


def _wanted(run: RunData, registry: Registry) -> list[Any]:
    """Items as of ``plugins.report_sections``: the run's, and names of those that come unasked."""
    plugins = run.config.get("plugins")
    listed: Any = plugins.get("report_sections") if isinstance(plugins, Mapping) else None
    asked = listed if isinstance(listed, list) else []
    names = {_name(given) for given in asked}
    others = [entry for entry in registry.index.of_kind("report_sections") if not {entry.name, entry.id} & names]
    return [*asked, *(entry.id for entry in others if _is_unasked(registry, entry.id))]


def _name(given: Any) -> str:
    return str(given.get("name", given) if isinstance(given, Mapping) else given)


def _is_unasked(registry: Registry, name: str) -> bool:
    with suppress(NemorlError):  # nobody asked for it; `nemorl plugins list` says what is wrong with it
        config: type[ReportSectionConfig] = registry.load("report_sections", name)
        return config.unasked
    return False


def _source(registry: Registry, given: Any) -> tuple[str, SectionSource]:
    """The section function of one item of ``plugins.report_sections``, and its owner."""
    (config,) = validate(PluginsConfig, {"report_sections": [given]}, "plugins", plugins=registry).report_sections
    owner = f"report section {registry.entry_of('report_sections', type(config)).id}"
    with boundary(owner), deadline(owner, LIMIT_S):
        source: SectionSource = config.build()
    return owner, source


def _made(run: RunData, owner: str, source: SectionSource) -> Section | None:
    with boundary(owner), deadline(owner, LIMIT_S):
        made = source(run)
    if made is not None and not isinstance(made, Section):
        raise PluginError(f"{owner} returned {made!r:.80}", fix="return a nemorl_cli.report.sections.Section")
    return made
