"""From listings to an index that others can trust, and to a table of it in which text of strangers is text.

A repository of listings holds one file per distribution, ``plugins/NAME.json``, which authors add by pull requests. Who
keeps it checks them, signs the index, and serves that one file.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from nemorl.base.files.atomic import replace_text
from nemorl.base.packages.plugin_policy import normalize
from nemorl.base.text.reading import parse_json, read_text
from nemorl.errors import UsageError
from nemorl.plugins.index import singular
from nemorl_trust.signed_json import read_private_key
from pydantic import ValidationError

from nemorl_cli.directory.indexes import INDEX, MAX_BYTES, checked, first_problem
from nemorl_cli.directory.listing import Listing, PluginIndex

MAX_LISTING_BYTES = 1 << 20
_ACTIVE = re.compile(r"[&<>\"'\\`*_\[\](){}#|~!$@]|(?<=\w):(?=//)|(?<=www)\.")
"""What Markdown, HTML, or a site that shows them might act on; addresses that become links included."""


def read_listings(given: Sequence[Path]) -> list[Listing]:
    """The listings of files and folders, by name.

    Raises:
        UsageError: One cannot be used, is in a file of another name, or names a distribution that another one has.
    """
    found: dict[str, Path] = {}
    listings = []
    for path in _files(given):
        listing = read_listing(path)
        name = normalize(listing.name)
        if path.name != f"{name}.json":
            raise UsageError(f"{path} lists {listing.name}", fix=f"call it {name}.json")
        if name in found:
            raise UsageError(f"{path} and {found[name]} both list {name}", fix="keep one of them")
        found[name] = path
        listings.append(listing)
    if not listings:
        raise UsageError(
            f"there is no listing in {', '.join(map(str, given))}", fix="nemorl plugins check --badge FOLDER"
        )
    return sorted(listings, key=lambda listing: normalize(listing.name))


def read_listing(path: Path) -> Listing:
    """
    Raises:
        UsageError: The file holds none.
    """
    fix = "write it: nemorl plugins check NAME --badge FOLDER"
    try:
        return Listing.model_validate(parse_json(read_text(path, MAX_LISTING_BYTES)))
    except ValidationError as error:
        raise UsageError(f"{path} is no listing of a plugin: {first_problem(error)}", fix=fix) from error
    except ValueError as error:
        raise UsageError(f"{path} is no listing of a plugin: {error}", fix=fix) from error


def listing_text(listing: Listing) -> str:
    return json.dumps(listing.model_dump(mode="json", exclude_none=True), indent=1, ensure_ascii=False) + "\n"


def write_index(listings: Sequence[Listing], output: Path, key: Path, name: str | None) -> PluginIndex:
    """Sign an index. Its serial is the time, and above that of the index that it replaces.

    Args:
        listings: What is in it.
        output: The file to write.
        key: File of the private key.
        name: Whose index it is. Unset: as before.

    Raises:
        UsageError: What is there is no index of this key, or nobody says what the new one is called.
    """
    private = read_private_key(key)
    before = None
    if output.exists():
        before = checked(INDEX.read(output.read_bytes(), output, [private.public_key()]), output)
    if name is None and before is None:
        raise UsageError(f"{output} is new, and nobody says whose index it is", fix="--name NAME, e.g. your domain")
    serial = max(int(time.time()), before.serial + 1 if before else 0)
    content = {"name": name or (before and before.name), "serial": serial, "plugins": listings}
    written = checked(content, output)
    text = INDEX.sign(written.model_dump(mode="json", exclude_none=True), private)
    if len(text.encode()) > MAX_BYTES:
        raise UsageError(f"{output} would be longer than {MAX_BYTES:,} bytes", fix="list fewer versions")
    replace_text(output, text)
    return written


def _files(given: Sequence[Path]) -> Iterator[Path]:
    for path in given:
        if not path.exists():
            raise UsageError(f"{path} does not exist", fix="name listings, or a folder of them")
        yield from sorted(path.glob("*.json")) if path.is_dir() else [path]


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
