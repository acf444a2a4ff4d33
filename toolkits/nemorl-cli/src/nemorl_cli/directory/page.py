"""Listings as a table in Markdown, in which text of strangers is text."""

from __future__ import annotations

import re
from collections.abc import Iterable

from nemorl.plugins.index import singular

from nemorl_cli.directory.listing import Listing

_ACTIVE = re.compile(r"[&<>\"'\\`*_\[\](){}#|~!$@]|(?<=\w):(?=//)|(?<=www)\.")
"""What Markdown, HTML, or a site that shows them might act on; addresses that become links included."""


def text(foreign: str) -> str:
    """``foreign`` so that it is shown as it is.

    >>> text("<b>_x_</b>")
    '&#60;b&#62;&#95;x&#95;&#60;/b&#62;'
    """
    return _ACTIVE.sub(lambda found: f"&#{ord(found[0])};", foreign)


def table(listings: Iterable[Listing]) -> str:
    """A row per distribution: what it is and offers, its newest version, what the conformance kit saw of that."""
    lines = ["| plugin | what it is | parts | version | works with nemorl | conformance |", "|---|---|---|---|---|---|"]
    return "\n".join([*lines, *map(_row, listings)]) + "\n"


def _row(listing: Listing) -> str:
    release = listing.newest
    name = f"[{text(listing.name)}]({listing.homepage})" if listing.homepage else text(listing.name)
    parts = "; ".join(f"{singular(kind)} {', '.join(map(_code, names))}" for kind, names in listing.parts.items())
    seen = release.conformance
    said = f"{seen.verdict}, {seen.summary} (kit {seen.kit}, {seen.date})" if seen else "not checked"
    what = f"{text(listing.summary)}{f' ({text(listing.licence)})' if listing.licence else ''}"
    cells = (name, what, parts, text(release.version), text(release.nemorl or "it does not say"), text(said))
    return f"| {' | '.join(cells)} |"


def _code(name: str) -> str:
    """Names hold letters, digits, ``.``, ``_`` and ``-`` only."""
    return f"`{name}`"
