"""What tried versions say of requirements: the line of each distribution that names the package, now and after."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from nemorl_insight.doctor.installed import Installed, applies
from nemorl_insight.doctor.packages import _editable_folder


@dataclass(frozen=True)
class Suggestion:
    """A requirement on the package that was tried."""

    owner: str
    where: str
    """The project's file for an editable install, else the distribution."""
    now: str
    after: str
    """The same where nothing that was tried speaks against or beyond it."""
    why: str

    def as_dict(self) -> dict[str, str]:
        return asdict(self)


def suggestions(name: str, present: str, tried: Mapping[str, bool], installed: Installed) -> list[Suggestion]:
    """One for each requirement of nemorl's distributions and of plugins on a package.

    Versions are taken to work as far from the present one as each that was tried does; those between were not tried.

    Args:
        name: Of the package.
        present: Its installed version, which works.
        tried: Version -> it works, whether or not its numbers differ.
        installed: All that is.
    """
    found = []
    for package in installed:
        if not package.is_plugin:
            continue
        for requirement in package.requirements:
            extras = sorted(package.distribution.metadata.get_all("Provides-Extra") or [])
            used = applies(requirement) or any(applies(requirement, extra) for extra in extras)
            if canonicalize_name(requirement.name) != canonicalize_name(name) or not used:
                continue
            folder = _editable_folder(package)
            after, why = supported(requirement.specifier, present, tried)
            where = package.name if folder is None else str(folder / "pyproject.toml")
            found.append(Suggestion(package.name, where, _line(requirement, None), _line(requirement, after), why))
    return found


def _line(requirement: Requirement, specifier: str | None) -> str:
    extras = f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""
    return f"{requirement.name}{extras}{_ordered(requirement.specifier) if specifier is None else specifier}"


def _ordered(specifier: SpecifierSet) -> str:
    """Lower bounds first, as people write it."""
    return ",".join(sorted(map(str, specifier), key=lambda text: (text[0] != ">", text)))


def supported(specifier: SpecifierSet, present: str, tried: Mapping[str, bool]) -> tuple[str, str]:
    """The bounds that the outcome supports, and why."""
    now = _ordered(specifier)
    bounds = {part.operator: Version(part.version) for part in specifier if part.operator in (">=", "<")}
    if len(bounds) != len(specifier):
        return now, "has other operators than >= and <: change it by hand"
    low, high, below, above = _reach(Version(present).public, tried)
    lower, upper = bounds.get(">="), bounds.get("<")
    reasons: list[str] = []
    if lower is not None and low < lower:
        lower, reasons = low, [*reasons, f"{low} works"]
    elif below is not None and (lower is None or below >= lower):
        lower, reasons = low, [*reasons, f"{below} breaks"]
    if upper is not None and high >= upper:
        upper, reasons = _next_minor(high), [*reasons, f"{high} works"]
    if above is not None and (upper is None or above < upper):
        upper, reasons = above, [*reasons, f"{above} breaks"]
    parts = [f">={_short(lower)}"] if lower is not None else []
    parts += [f"<{_short(upper)}"] if upper is not None else []
    return ",".join(parts), "; ".join(reasons) or "admits what works, and nothing that was seen to break"


def _reach(present: str, tried: Mapping[str, bool]) -> tuple[Version, Version, Version | None, Version | None]:
    """The lowest and highest version that work without a break between, and the nearest that break."""
    here = Version(present)
    outcome = {Version(version): works for version, works in tried.items()}
    low, below = _edge(here, sorted((v for v in outcome if v < here), reverse=True), outcome)
    high, above = _edge(here, sorted(v for v in outcome if v > here), outcome)
    return low, high, below, above


def _edge(here: Version, away: list[Version], outcome: Mapping[Version, bool]) -> tuple[Version, Version | None]:
    for version in away:
        if not outcome[version]:
            return here, version
        here = version
    return here, None


def _next_minor(version: Version) -> Version:
    return Version(f"{version.major}.{version.minor + 1}")


def _short(version: Version) -> str:
    """
    >>> _short(Version("5.10.0")), _short(Version("5.10.1"))
    ('5.10', '5.10.1')
    """
    release = version.release
    is_final = len(release) == 3 and release[2] == 0 and version.pre is None and version.post is None
    return f"{release[0]}.{release[1]}" if is_final else version.public


def broken_requirements(changes: Mapping[str, str], installed: Installed) -> Iterator[str]:
    """Requirements of installed distributions that the new versions do not fit, before anything is installed."""
    new = {canonicalize_name(name): version for name, version in changes.items()}
    for package in installed:
        if package.key in new:
            continue
        for requirement in package.requirements:
            version = new.get(canonicalize_name(requirement.name))
            if version is not None and applies(requirement) and not requirement.specifier.contains(version, True):
                yield f"{package} asks for {_line(requirement, None)}"
