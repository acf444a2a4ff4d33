"""The presets by name: for ``nemorl datasets`` and the documentation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nemorl_tasks.datasets.preset_file import TASKS, Preset, presets


@dataclass(frozen=True)
class Listed:
    """One preset, as lists show it."""

    name: str
    other_names: tuple[str, ...]
    """Aliases and variants."""
    task: str
    rows: Mapping[str, int]
    """Published number of rows by split; empty where the rows are the user's."""
    hub: str | None
    licence: str
    summary: str
    homepage: str
    citation: str

    @classmethod
    def of(cls, preset: Preset) -> Listed:
        others = preset.names[1:]
        return cls(
            preset.name,
            others,
            preset.task,
            preset.rows,
            preset.hub,
            preset.licence,
            preset.summary,
            preset.homepage,
            preset.citation,
        )


def listed(task: str | None = None) -> list[Listed]:
    """All presets by task and name, or those of one task."""
    found = [Listed.of(preset) for preset in presets().values() if task in (None, preset.task)]
    return sorted(found, key=lambda entry: (TASKS.index(entry.task), entry.name.casefold()))
