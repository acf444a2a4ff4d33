"""Installed packages, read once from metadata. Imports none of it, and judges nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib import metadata
from pathlib import Path

from nemorl.base.packages.distributions import guarded
from nemorl.plugins.index import PREFIX
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version


@dataclass(frozen=True)
class Package:
    """One installed distribution."""

    name: str
    """As its metadata write it."""
    version: str
    folder: Path
    """The folder of ``sys.path`` that holds it."""
    requires: tuple[str, ...] = field(repr=False)
    """``Requires-Dist``, unparsed: most packages are never asked."""
    distribution: metadata.Distribution = field(repr=False, compare=False)

    @cached_property
    def key(self) -> str:
        """The normalized name (PEP 503), to compare by."""
        return canonicalize_name(self.name)

    @property
    def minor(self) -> tuple[int, ...] | None:
        """(2, 13) of 2.13.0+cpu."""
        try:
            return Version(self.version).release[:2]
        except InvalidVersion:
            return None

    @property
    def is_ours(self) -> bool:
        """One of nemorl's own packages."""
        return self.key == "nemorl" or self.key.startswith("nemorl-")

    @cached_property
    def is_plugin(self) -> bool:
        """One of nemorl's own packages, or one that offers a plugin."""
        return self.is_ours or any(point.group.startswith(PREFIX) for point in self.points)

    @cached_property
    def requirements(self) -> tuple[Requirement, ...]:
        return tuple(filter(None, map(_requirement, self.requires)))

    @cached_property
    def points(self) -> metadata.EntryPoints:
        return self.distribution.entry_points

    def read(self, path: str) -> str:
        """A file of the package, relative to ``folder``; empty if there is none."""
        try:
            return (self.folder / path).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""

    def admits(self, requirement: Requirement) -> bool:
        try:
            return requirement.specifier.contains(self.version, prereleases=True)
        except InvalidVersion:
            return False

    def __str__(self) -> str:
        return f"{self.name} {self.version}"


class Installed:
    """The distributions of an interpreter, by normalized name. The first on the path wins, as it does for import.

    Args:
        path: Folders to look into. Unset: ``sys.path``.
    """

    def __init__(self, path: Sequence[str] | None = None) -> None:
        found = metadata.distributions() if path is None else metadata.distributions(path=list(path))
        self._packages: dict[str, Package] = {}
        self.shadowed: list[tuple[Package, Package]] = []
        """(the one that wins, another version further down the path or beside it)"""
        for package in filter(None, map(_read, map(guarded, found))):
            first = self._packages.setdefault(package.key, package)
            if first.version != package.version:
                self.shadowed.append((first, package))

    def __iter__(self) -> Iterator[Package]:
        return iter(self._packages.values())

    def get(self, name: str) -> Package | None:
        return self._packages.get(canonicalize_name(name))

    def some(self, names: Sequence[str]) -> list[Package]:
        """Those of ``names`` that are installed."""
        return [package for name in names if (package := self.get(name)) is not None]


def applies(requirement: Requirement, extra: str = "") -> bool:
    """Whether a requirement holds on this machine, for an extra or for the package alone."""
    try:
        return requirement.marker is None or requirement.marker.evaluate({"extra": extra})
    except ValueError:  # a marker that names or compares what does not exist
        return False


def _read(distribution: metadata.Distribution) -> Package | None:
    try:
        facts = distribution.metadata
        name, version = facts["Name"], facts["Version"]
    except (ValueError, KeyError):  # no text, or without a name
        return None
    if not name or not version:  # what an interrupted pip leaves behind
        return None
    requires = tuple(facts.get_all("Requires-Dist") or ())
    return Package(name, version, Path(str(distribution.locate_file(""))), requires, distribution)


def _requirement(text: str) -> Requirement | None:
    try:
        return Requirement(text)
    except InvalidRequirement:
        return None
