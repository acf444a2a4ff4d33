"""Whose an entry point is, by importlib.metadata, also where what pip wrote has been damaged since.

An interrupted install or a full disk leaves metadata without a name, or that are no text. Asking for them raises,
which must not concern the other distributions.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path

UNKNOWN = "unknown"


@dataclass(frozen=True)
class Owner:
    """What a distribution's METADATA says of it."""

    name: str
    version: str
    summary: str = ""
    requires: tuple[str, ...] = ()
    damage: str | None = None
    """What is wrong with it; ``None``: nothing."""


def owner_of(point: metadata.EntryPoint) -> tuple[str, str, str | None]:
    """Name and version of an entry point's distribution, and what is damaged about either; ``None``: nothing."""
    if point.dist is None:
        return f"registered in {point.value.partition(':')[0]}", "0", None
    owner = described(point.dist)
    damage = owner.damage
    if damage is None and metadata.EntryPoint.pattern.match(point.value) is None:
        damage = f"its entry point {point.name!r} leads to {point.value!r}, which is not `module:attribute`"
    return owner.name, owner.version, damage


@cache
def described(dist: metadata.Distribution) -> Owner:
    """Parsed once: ``importlib.metadata`` does it again for every question, at half a millisecond each."""
    damage = "its METADATA has no name"
    try:
        found = dist.metadata
        if found["Name"]:
            requires = tuple(found.get_all("Requires-Dist") or ())
            return Owner(found["Name"], found["Version"] or UNKNOWN, found["Summary"] or "", requires)
    except (ValueError, KeyError) as error:
        damage = f"its METADATA cannot be read ({error})"
    # Only the folder is left to name it by, which importlib.metadata keeps to itself.
    folder = Path(str(getattr(dist, "_path", UNKNOWN)))
    return Owner(folder.name.partition("-")[0], UNKNOWN, damage=damage)
