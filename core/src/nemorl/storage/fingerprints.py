"""A run's inputs beside its config: its rows, and the code of its rewards. Saved with each checkpoint, so that a
run does not go on with others unnoticed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from nemorl.errors import DataError

FILE = "inputs.json"
"""In the run directory: those of the process that began or continued it last."""


@dataclass(frozen=True)
class Fingerprints:
    """Texts that differ where what they stand for does. ``None`` where that is not known."""

    data: str | None = None
    """Of the training rows."""
    validation: str | None = None
    """Of the held-out rows."""
    validation_data: Any = None
    """The config's ``validation.data``: who changes it means other rows."""
    code: Mapping[str, str] = field(default_factory=dict)
    """Of the source of rewards and agents, by their names or files."""
    weights: Mapping[str, str | None] = field(default_factory=dict)
    """Of the weights that each model begins with, by its part of the run: ``policy``, ``critic``, …"""

    def other_rows(self, before: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
        """Data with other rows than were recorded: its name -> the fingerprints before and now."""
        pairs = {"the training rows": (before.get("data"), self.data)}
        if before.get("validation_data") == self.validation_data:
            pairs["the validation rows"] = (before.get("validation"), self.validation)
        return {
            name: (old, new)
            for name, (old, new) in pairs.items()
            if isinstance(old, str) and isinstance(new, str) and old != new
        }

    def other_code(self, before: Mapping[str, Any]) -> Iterator[str]:
        """Names of rewards whose source is another than was recorded."""
        recorded = before.get("code", {})
        yield from (name for name in sorted(self.code) if recorded.get(name, self.code[name]) != self.code[name])


def refuse(changes: Mapping[str, tuple[str, str]], place: str) -> None:
    """Refuse to continue with other rows.

    Args:
        changes: From :meth:`Fingerprints.other_rows`; nothing happens where there are none.
        place: The checkpoint that was saved with the rows as they were.
    """
    if changes:
        told = "; ".join(f"{name} were {old:.80}, are {new:.80}" for name, (old, new) in changes.items())
        raise DataError(
            f"the data is not what {place} was trained on: {told}",
            fix="put the rows back as they were, start a new run (--fresh, or another run_dir), or go on with "
            "these: --accept-changed-data, in Python fit(accept_changed_data=True)",
        )
