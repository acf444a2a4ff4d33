"""What an index says of a plugin. Readers take fields that they do not know for those of a later nemorl.

Text of strangers is bounded here, and holds no control characters. Names are such that they can be neither a path nor
an option of pip.
"""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Annotated, Literal

from nemorl.base.packages.plugin_policy import normalize
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, computed_field, model_validator

from nemorl_cli.terminal import plain

MAX_LISTINGS = 20_000
MAX_PARTS = 500
"""Of one kind, of one distribution."""
MAX_VERSIONS = 200
SUMMARY_CHARACTERS = 300
WHY_CHARACTERS = 500
"""Of a reason why a check failed or was skipped."""


def _one_plain_line(text: str) -> str:
    if plain(text) != text or "\n" in text:
        raise ValueError("one line of text without control characters is wanted")
    return text


def _version(text: str) -> str:
    try:
        return str(Version(text))
    except InvalidVersion as error:
        raise ValueError(str(error)) from error


def _range(text: str) -> str:
    try:
        bounds = map(str, SpecifierSet(text))
        return ",".join(sorted(bounds, reverse=True))  # lower ones first
    except InvalidSpecifier as error:
        raise ValueError(str(error)) from error


Line = Annotated[str, StringConstraints(max_length=SUMMARY_CHARACTERS), AfterValidator(_one_plain_line)]
Why = Annotated[str, StringConstraints(max_length=WHY_CHARACTERS), AfterValidator(_one_plain_line)]
Distribution = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9]([A-Za-z0-9._-]{0,98}[A-Za-z0-9])?$")]
"""As PEP 508 has it."""
Kind = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z_]{0,49}$")]
"""An entry-point group without ``nemorl.``; a later nemorl may have more of them."""
Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")]
Address = Annotated[str, StringConstraints(pattern=r"^https?://[A-Za-z0-9._~:/?#@!$&*+,;=%-]{1,300}$")]
"""Without what could end a link in Markdown or HTML."""
VersionText = Annotated[str, StringConstraints(max_length=100), AfterValidator(_version)]
Range = Annotated[str, StringConstraints(max_length=200), AfterValidator(_range)]
Digest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]


class _Data(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class PartResult(_Data):
    """What the conformance kit saw of one part."""

    passed: int = Field(ge=0)
    """Checks that hold."""
    skipped: Mapping[Line, Why] = Field(default_factory=dict, max_length=MAX_PARTS)
    """Check -> why it says nothing here."""
    failed: tuple[Why, ...] = Field((), max_length=MAX_PARTS)
    """The first line of each problem."""
    notes: tuple[Why, ...] = Field((), max_length=MAX_PARTS)
    """E.g. why it was not built."""


class Conformance(_Data):
    """What `nemorl plugins check` saw of one version, on its author's machine or wherever else it ran."""

    date: datetime.date
    kit: VersionText
    """Version of nemorl-testing."""
    nemorl: VersionText
    """Version of nemorl-core that it ran with."""
    python: VersionText
    level: Literal["quick", "full"]
    device: Line
    """Where backends computed."""
    parts: Mapping[Line, PartResult] = Field(min_length=1, max_length=MAX_PARTS)
    """By ``kind:name``."""

    @computed_field  # type: ignore[prop-decorator]
    @property
    def verdict(self) -> Literal["passed", "partial", "failed"]:
        """``partial``: nothing failed, and of some part no check ran."""
        if any(part.failed for part in self.parts.values()):
            return "failed"
        return "passed" if all(part.passed for part in self.parts.values()) else "partial"

    @property
    def summary(self) -> str:
        """E.g. ``full: 31 passed, 2 skipped``."""
        parts = self.parts.values()
        counts = {
            "failed": sum(len(part.failed) for part in parts),
            "passed": sum(part.passed for part in parts),
            "skipped": sum(len(part.skipped) for part in parts),
        }
        untried = sum(not part.passed and not part.failed for part in parts)
        said = [f"{count} {what}" for what, count in counts.items() if count or what == "passed"]
        said += [f"{untried} of {len(self.parts)} parts not tried"] if untried else []
        return f"{self.level}: {', '.join(said)}"


class Release(_Data):
    """One version."""

    version: VersionText
    nemorl: Range | None = None
    """Versions of nemorl-core that it works with. Unset: its metadata do not say."""
    python: Range | None = None
    sha256: Digest | None = None
    """Of its wheel, where that is known."""
    conformance: Conformance | None = None
    """Unset: nobody checked it."""

    def problems_with(self, *, nemorl: str, python: str) -> list[str]:
        """Why it cannot be used with these versions."""
        asked = (("nemorl", self.nemorl, nemorl), ("Python", self.python, python))
        return [
            f"needs {what} {wanted}, and this is {have}"
            for what, wanted, have in asked
            if wanted is not None and not SpecifierSet(wanted).contains(have, prereleases=True)
        ]


class Listing(_Data):
    """One distribution."""

    name: Distribution
    summary: Line = ""
    licence: Line = ""
    homepage: Address | None = None
    parts: Mapping[Kind, Annotated[Mapping[Name, Line], Field(max_length=MAX_PARTS)]] = Field(max_length=50)
    """Kind -> name -> summary, of the newest version."""
    versions: tuple[Release, ...] = Field(min_length=1, max_length=MAX_VERSIONS)
    """The newest first."""

    @model_validator(mode="after")
    def _each_version_once(self) -> Listing:
        again = [
            version for version, count in Counter(release.version for release in self.versions).items() if count > 1
        ]
        if again:
            raise ValueError(f"version {again[0]} is listed twice")
        return self

    def release_for(self, *, nemorl: str, python: str) -> Release:
        """The newest version that these can use, else the newest."""
        usable = [release for release in self.versions if not release.problems_with(nemorl=nemorl, python=python)]
        return _newest(usable or self.versions)

    @property
    def newest(self) -> Release:
        """The highest version, a final one if there is any."""
        return _newest(self.versions)


def _newest(releases: Iterable[Release]) -> Release:
    def age(release: Release) -> tuple[bool, Version]:
        version = Version(release.version)
        return not version.is_prerelease, version

    return max(releases, key=age)


class PluginIndex(_Data):
    """The content of an index file."""

    name: Name
    """Whose index it is, e.g. ``nemorl``."""
    serial: int = Field(ge=0, lt=2**53)
    """Seconds since 1970 when it was signed: a later index has a higher one. 0 of the one that comes with nemorl."""
    plugins: tuple[Listing, ...] = Field(max_length=MAX_LISTINGS)

    @model_validator(mode="after")
    def _each_distribution_once(self) -> PluginIndex:
        again = [name for name, count in Counter(normalize(each.name) for each in self.plugins).items() if count > 1]
        if again:
            raise ValueError(f"{again[0]} is listed twice")
        return self

    @property
    def date(self) -> str:
        """The day of its serial, e.g. ``2026-11-27``; empty where it has none."""
        return str(datetime.datetime.fromtimestamp(self.serial, datetime.UTC).date()) if self.serial else ""
