"""What stops a plugin, as data: kept by the index, shown by ``plugins list``, raised only when it is selected."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class Diagnostic:
    """One reason why one plugin cannot be used."""

    state: str
    """Short word for tables: ``blocked``, ``ambiguous``, ``incompatible``, ``missing``, ``broken``, …"""
    code: str
    """Stable, e.g. ``NRL103``; documented in docs/plugins.md."""
    plugin: str
    """``distribution:name``"""
    message: str
    fix: str
    cause: str | None = None
    """The exception behind it, as text."""

    def as_dict(self) -> dict[str, str | None]:
        return asdict(self)
