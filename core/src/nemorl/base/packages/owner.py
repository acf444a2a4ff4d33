"""Whose an entry point is, by importlib.metadata, also where what pip wrote has been damaged since.

An interrupted install or a full disk leaves metadata without a name, or that are no text. Asking for them raises,
which must not concern the other distributions.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import metadata

from nemorl.base.packages.distributions import InstalledDistribution

UNKNOWN = "unknown"
DAMAGED = "distributions"
"""Stands in the place of a kind for a distribution with damaged metadata, which may offer anything."""


class DamagedPoint(metadata.EntryPoint):
    """A distribution whose list of entry points, or another file beside it, cannot be read."""

    damage: str

    def __init__(self, group: str, dist: metadata.Distribution, damage: str) -> None:
        super().__init__(described(dist).name, "", group)
        vars(self).update(dist=dist, damage=damage)  # entry points refuse assignment


@dataclass(frozen=True)
class Owner:
    """Facts from a distribution's METADATA."""

    name: str
    version: str
    summary: str = ""
    requires: tuple[str, ...] = ()
    damage: str | None = None
    """The fault of the metadata; ``None``: it has none."""


def owner_of(point: metadata.EntryPoint) -> tuple[str, str, str | None]:
    """Name and version of an entry point's distribution, and what is damaged about either; ``None``: nothing."""
    if point.dist is None:
        return f"registered in {point.value.partition(':')[0]}", "0", None
    owner = described(point.dist)
    if isinstance(point, DamagedPoint):
        return owner.name, owner.version, point.damage
    damage = owner.damage
    if damage is None and metadata.EntryPoint.pattern.match(point.value) is None:
        damage = f"its entry point {point.name!r} leads to {point.value!r}, which is not `module:attribute`"
    return owner.name, owner.version, damage


@cache
def described(dist: metadata.Distribution) -> Owner:
    """Parsed once: ``importlib.metadata`` does it again for every question, at half a millisecond each."""
    try:
        found = dist.metadata
        name, version, summary = (found[key] for key in ("Name", "Version", "Summary"))
        requires = tuple(found.get_all("Requires-Dist") or ())
    except (ValueError, KeyError, TypeError) as error:
        return Owner(_folder_name(dist), UNKNOWN, damage=f"its METADATA cannot be read ({error})")
    damages = map(dist.damage_of, ("METADATA", "PKG-INFO")) if isinstance(dist, InstalledDistribution) else ()
    damage = next(filter(None, damages), None)
    if damage is None and not (name and version):
        damage = f"its METADATA has no {'version' if name else 'name'}"
    return Owner(name or _folder_name(dist), version or UNKNOWN, summary or "", requires, damage)


def _folder_name(dist: metadata.Distribution) -> str:
    return dist.folder_name if isinstance(dist, InstalledDistribution) else UNKNOWN
