"""What `nemorl plugins check` saw of a version, as a listing for an index and as a badge for a README.

Both say what ran, what was skipped and by which kit. They are the word of whoever ran the check.
"""

from __future__ import annotations

import datetime
import json
import platform
from collections.abc import Iterable, Mapping, Sequence
from email.message import Message
from html import escape
from importlib import metadata
from pathlib import Path
from typing import Any

from nemorl import __version__
from nemorl.base.files.atomic import replace_text
from nemorl.base.packages.plugin_policy import normalize
from nemorl.errors import UsageError
from nemorl.plugins import PluginEntry
from nemorl.plugins.index import requirement_on_kernel
from nemorl_trust.source import read_source
from packaging.version import Version
from pydantic import TypeAdapter, ValidationError

from nemorl_cli.directory.indexes import first_problem
from nemorl_cli.directory.listing import (
    SUMMARY_CHARACTERS,
    WHY_CHARACTERS,
    Address,
    Conformance,
    Listing,
    PartResult,
    Release,
)
from nemorl_cli.directory.publishing import listing_text, read_listing
from nemorl_cli.terminal import plain

COLOURS = {"passed": "#4c1", "quick": "#a4a61d", "partial": "#dfb317", "failed": "#e05d44"}
"""The greens, yellows and reds that readers of badges know; less green where only the quick checks ran."""
LABEL = "nemorl conformance"
PIXELS = 6.3
"""Of a character, about: the text is then fitted."""
MARGIN = 6


def write_badges(
    results: Sequence[Mapping[str, Any]], entries: Sequence[PluginEntry], folder: Path, *, full: bool, device: str
) -> list[Path]:
    """A listing and a badge per distribution. Other versions that a listing in the folder has stay in it.

    Args:
        results: Of `check`, one per entry.
        entries: All parts of some distributions, in the same order.
        folder: A folder, for ``NAME.json`` and ``NAME-VERSION.svg``.
        full: Every check ran, not only the quick ones.
        device: Where backends computed.

    Returns:
        The files.

    Raises:
        UsageError: The metadata of a distribution can be in no listing, or what is in the folder is none.
    """
    written: list[Path] = []
    for name in dict.fromkeys(normalize(entry.distribution) for entry in entries):
        own = [position for position, entry in enumerate(entries) if normalize(entry.distribution) == name]
        seen = {f"{entries[at].kind}:{entries[at].name}": _part(results[at]) for at in own}
        try:
            conformance = Conformance(
                date=datetime.datetime.now(datetime.UTC).date(),
                kit=metadata.version("nemorl-testing"),
                nemorl=__version__,
                python=platform.python_version(),
                level="full" if full else "quick",
                device=device,
                parts=seen,
            )
            listing = listing_of([entries[at] for at in own], conformance)
        except ValidationError as error:
            raise UsageError(
                f"{name} can be in no listing: {first_problem(error)}", fix="correct its metadata"
            ) from error
        file = folder / f"{normalize(listing.name)}.json"
        badge = folder / f"{file.stem}-{listing.newest.version}.svg"
        replace_text(file, listing_text(merged(listing, read_listing(file)) if file.exists() else listing))
        replace_text(badge, svg(listing.newest.version, conformance))
        written += [file, badge]
    return written


def listing_of(entries: Sequence[PluginEntry], conformance: Conformance | None = None) -> Listing:
    """The listing of a distribution that is installed, with the version that it is.

    Raises:
        ValidationError: Its metadata can be in no listing.
    """
    dist, requirement = entries[0].point.dist, requirement_on_kernel(entries[0])
    facts: Any = dist.metadata if dist is not None else Message()  # of this program: it has no metadata
    parts: dict[str, dict[str, str]] = {}
    for entry in entries:
        parts.setdefault(entry.kind, {})[entry.name] = _line(read_source(entry).summary, SUMMARY_CHARACTERS)
    release = Release(
        version=entries[0].version,
        nemorl=str(requirement.specifier) if requirement else None,
        python=facts.get("Requires-Python"),
        sha256=_wheel(dist),
        conformance=conformance,
    )
    return Listing(
        name=entries[0].distribution,
        summary=_line(facts.get("Summary") or "", SUMMARY_CHARACTERS),
        licence=_line(facts.get("License-Expression") or facts.get("License") or "", SUMMARY_CHARACTERS),
        homepage=_homepage(facts),
        parts=parts,
        versions=(release,),
    )


def merged(listing: Listing, before: Listing) -> Listing:
    """The versions of both; what else there is to say, of the newer."""
    new = listing.versions[0]
    others = [release for release in before.versions if release.version != new.version]
    versions = sorted((new, *others), key=lambda release: Version(release.version), reverse=True)
    about = listing if versions[0] is new else before
    return about.model_copy(update={"versions": tuple(versions)})


def _part(result: Mapping[str, Any]) -> PartResult:
    return PartResult(
        passed=len(result["passed"]),
        skipped={check: _line(why, WHY_CHARACTERS) for check, why in result["skipped"].items()},
        failed=tuple(_line(problem["what"], WHY_CHARACTERS) for problem in result["problems"]),
        notes=tuple(_line(note, WHY_CHARACTERS) for note in result["notes"]),
    )


def _line(text: str, most: int) -> str:
    """Text of a plugin on one line, in which nothing acts."""
    return plain(" ".join(text.split()))[:most]


def _homepage(facts: Any) -> str | None:
    """The first address of the metadata that can stand in a listing."""
    pairs = [line.partition(",")[::2] for line in facts.get_all("Project-URL") or ()]
    named = {label.strip().lower(): url.strip() for label, url in pairs}
    labels = ("homepage", "source", "repository", "documentation")
    return next(filter(_is_address, (facts.get("Home-page"), *map(named.get, labels))), None)


def _is_address(text: str | None) -> bool:
    try:
        TypeAdapter(Address).validate_python(text)
    except ValidationError:
        return False
    return True


def _wheel(dist: metadata.Distribution | None) -> str | None:
    """The SHA-256 of the wheel, which pip notes where it installed a file or an address (PEP 610)."""
    text = dist.read_text("direct_url.json") if dist is not None else None
    try:
        archive = json.loads(text or "{}").get("archive_info", {})
        return archive.get("hashes", {}).get("sha256")  # type: ignore[no-any-return]
    except (ValueError, AttributeError):
        return None


def svg(version: str, conformance: Conformance) -> str:
    """A badge of two fields, 20 pixels high, that loads nothing from elsewhere."""
    said, verdict = f"{version} {conformance.summary}", conformance.verdict
    colour = COLOURS["quick" if (verdict, conformance.level) == ("passed", "quick") else verdict]
    left, right = (round(len(text) * PIXELS + 2 * MARGIN) for text in (LABEL, said))
    hint = f"{verdict}: kit {conformance.kit}, nemorl {conformance.nemorl}, {conformance.device}, {conformance.date}"
    fields = "".join(
        f'<text x="{start + MARGIN}" y="14" textLength="{width - 2 * MARGIN}">{escape(text)}</text>'
        for text, start, width in ((LABEL, 0, left), (said, left, right))
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + right}" height="20" role="img" '
        f'aria-label="{escape(f"{LABEL}: {said}")}">\n<title>{escape(hint)}</title>\n'
        f'<rect width="{left}" height="20" rx="3" fill="#555"/>'
        f'<rect x="{left}" width="{right}" height="20" rx="3" fill="{colour}"/>\n'
        f'<g fill="#fff" font-family="Verdana,DejaVu Sans,sans-serif" font-size="11">{fields}</g>\n</svg>\n'
    )


def listings_of(entries: Iterable[PluginEntry]) -> list[Listing]:
    """The listings of all distributions of some entries, by name."""
    by_name: dict[str, list[PluginEntry]] = {}
    for entry in entries:
        by_name.setdefault(normalize(entry.distribution), []).append(entry)
    return [listing_of(by_name[name]) for name in sorted(by_name)]
