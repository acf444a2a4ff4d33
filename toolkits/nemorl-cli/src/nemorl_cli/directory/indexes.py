"""Where indexes are, and which are believed.

The one that comes with nemorl is a file of nemorl-core: whoever trusts that package trusts it. Any other is named
together with a public key, and must be signed by it. The last index that was accepted from a place is kept: it is used
where the place cannot be reached, and an older one, or another of the same second, is refused.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from http.client import HTTPException
from pathlib import Path
from typing import Any, BinaryIO

from nemorl.base.files.atomic import replacing
from nemorl.base.packages.plugin_policy import policy_files
from nemorl.base.packages.standard_plugins import LISTED
from nemorl.base.text.pydantic_words import in_words
from nemorl.base.text.reading import expanded, kind_of, parse_json, read_text
from nemorl.base.text.yaml_text import parse_yaml
from nemorl.errors import StorageError, UsageError
from nemorl_trust.encryption import names_loopback
from nemorl_trust.signed_json import SignedFormat, read_public_key
from pydantic import ValidationError

from nemorl_cli.directory.listing import PluginIndex

INDEX = SignedFormat("nemorl plugin index 1", "index", "plugin index", "nemorl plugins index --key FILE")
OWN = str(LISTED)
"""Where the index that comes with nemorl is. It carries no signature, so nobody can name it as another one."""
VARIABLE = "NEMORL_PLUGIN_INDEX"
"""Path or URL of one more index."""
KEY_VARIABLE = "NEMORL_PLUGIN_INDEX_KEY"
"""The public key that signed it."""
MAX_BYTES = 16 << 20
"""Of an index: ten thousand plugins, a fifth of that with verdicts."""
TIMEOUT_S = 20.0
"""To read one from the network, all in all."""
CHUNK_BYTES = 1 << 16
CLOCKS_DIFFER_S = 86_400
"""An index from further in the future would make its successors look old."""


@dataclass(frozen=True)
class IndexSource:
    """One index that somebody named."""

    location: str
    """Path or URL"""
    key: Path
    """File with the public key of who signs it."""


@dataclass(frozen=True)
class ReadIndex:
    """An index, or why there is none."""

    location: str
    index: PluginIndex | None
    note: str = ""
    """E.g. that it is a copy of before."""
    refusal: UsageError | None = None


@cache
def own_index() -> PluginIndex:
    """The one that comes with nemorl: this repository's packages."""
    return PluginIndex.model_validate(parse_json(LISTED.read_bytes())["index"])


def read_all(location: str | None, key: Path | None) -> list[ReadIndex]:
    """nemorl's own index, then those of the site, the user, the environment and the command line."""
    found = [ReadIndex(OWN, own_index())]
    for source in dict.fromkeys(sources(location, key)):
        try:
            found.append(read_index(source))
        except UsageError as error:
            found.append(ReadIndex(source.location, None, refusal=error))
    return found


def sources(location: str | None, key: Path | None) -> Iterator[IndexSource]:
    """The indexes that somebody named, with their keys.

    Raises:
        UsageError: One is named without a key, or settings cannot be understood.
    """
    for path in policy_files():
        if path.is_file():
            yield from _configured(path)
    named = os.environ.get(VARIABLE), os.environ.get(KEY_VARIABLE)
    for place, text, option in ((named[0], named[1], KEY_VARIABLE), (location, key, "--key")):
        if place and not text:
            raise UsageError(
                f"the index {place} is named without the public key of who signs it",
                fix=f"{option}{'=' if option == KEY_VARIABLE else ' '}FILE, as its publisher gives it",
            )
        if text and not place:
            raise UsageError(f"{option} {text} is the key of no index", fix="name the index: --index FILE_OR_URL")
        if place:
            yield IndexSource(place, expanded(text or ""))


def _configured(path: Path) -> Iterator[IndexSource]:
    """``plugins.indexes`` of a settings file. Keys are beside it, unless their paths are absolute."""
    try:
        plugins = (parse_yaml(read_text(path)) or {}).get("plugins") or {}
        for each in plugins.get("indexes") or ():
            yield IndexSource(str(each["location"]), path.parent / expanded(each["key"]))
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        raise UsageError(
            f"plugins.indexes in {path} cannot be understood: {error!r}",
            fix="write a list of {location: PATH or URL, key: PUBLIC KEY FILE}",
        ) from error


def read_index(source: IndexSource) -> ReadIndex:
    """An index that its key signed, and that is no older than the last one from there.

    Raises:
        UsageError: It is refused: says why, and what to do.
    """
    location, keys = source.location, [read_public_key(source.key)]
    kept_at = _kept_at(location)
    try:
        kept_text: bytes | None = kept_at.read_bytes()
        kept = checked(INDEX.read(kept_text or b"", kept_at, keys), kept_at)
    except (OSError, UsageError):  # none, or of another key
        kept_text, kept = None, None
    try:
        text = _read(location)
    except OSError as error:
        why = f"{location} cannot be read ({error})"
        if kept is None:
            raise UsageError(why, fix="check the path or URL; what was read once is kept for such times") from error
        return ReadIndex(location, kept, f"{why}: this is the copy of {kept.date}")
    index = checked(INDEX.read(text, location, keys), location)
    _refuse_older(location, index, kept, is_same=text == kept_text)
    try:
        kept_at.parent.mkdir(parents=True, exist_ok=True)
        with replacing(kept_at) as file:
            file.write(text)
    except (OSError, StorageError) as error:
        return ReadIndex(location, index, f"it could not be kept ({error}), so an older one will not be noticed")
    return ReadIndex(location, index)


def checked(content: Any, source: object) -> PluginIndex:
    """
    Raises:
        UsageError: The content of an index is not what it has to be; names the first place.
    """
    try:
        return PluginIndex.model_validate(content)
    except ValidationError as error:
        raise UsageError(f"{source} is no plugin index: {first_problem(error)}", fix="tell its publisher") from error


def first_problem(error: ValidationError) -> str:
    """Where and what the first of pydantic's problems is, in a line."""
    first = error.errors(include_url=False)[0]
    place = [str(key) for key in first["loc"]]
    message, fix = in_words(first, place[-1] if place else "")  # type: ignore[arg-type]
    return f"{'.'.join(place) or 'it'} {message}{f' ({fix})' if fix else ''}"


def _refuse_older(location: str, index: PluginIndex, kept: PluginIndex | None, *, is_same: bool) -> None:
    if index.serial > time.time() + CLOCKS_DIFFER_S:
        raise UsageError(f"{location} is of {index.date}, which is to come", fix="set this machine's clock, or theirs")
    if kept is None or is_same:
        return
    if index.name != kept.name:
        raise UsageError(
            f"{location} was the index {kept.name!r}, and is {index.name!r} now",
            fix=f"ask its publisher; if that is meant, remove {_kept_at(location)}",
        )
    if index.serial <= kept.serial:
        what = "older than" if index.serial < kept.serial else "another of the same second as"
        raise UsageError(
            f"{location} (serial {index.serial}) is {what} the one that was read here before (serial {kept.serial}): "
            "somebody may hold back or replay what was signed",
            fix=f"ask its publisher; if that is meant, remove {_kept_at(location)}",
        )


def _kept_at(location: str) -> Path:
    """Where the last index from a place is kept."""
    from platformdirs import user_state_path

    name = location if _is_url(location) else str(expanded(location).resolve())
    return user_state_path("nemorl") / "plugin-indexes" / f"{hashlib.sha256(name.encode()).hexdigest()[:32]}.json"


def _is_url(location: str) -> bool:
    return "://" in location


def _read(location: str) -> bytes:
    """
    Raises:
        OSError: It is not there.
        UsageError: It is too long, or would come unencrypted.
    """
    if not _is_url(location):
        path = expanded(location)
        if (what := kind_of(path)) != "file":  # a pipe would be waited for
            raise UsageError(f"{location} is a {what}, not a file", fix="give a path or a URL")
        with path.open("rb") as file:
            return _bounded(file, location)
    scheme = location.partition("://")[0].lower()
    if scheme != "https" and not (scheme == "http" and names_loopback(location)):
        raise UsageError(f"{location} is neither a path nor a URL of https", fix="give one of them")
    from urllib.error import HTTPError
    from urllib.request import HTTPRedirectHandler, Request, build_opener

    class Stay(HTTPRedirectHandler):
        def redirect_request(self, *_: Any) -> None:
            """The publisher gave this address, and no other."""

    try:
        asked = Request(location, headers={"Accept-Encoding": "identity", "User-Agent": "nemorl"})
        with build_opener(Stay).open(asked, timeout=TIMEOUT_S) as response:
            return _bounded(response, location)
    except HTTPError as error:
        moved = error.headers.get("Location") if error.code in range(300, 400) else None
        error.close()
        raise OSError(f"it answers {error.code}{f', and names {moved}' if moved else ''}") from error
    except (HTTPException, ValueError) as error:  # ends early, or is no URL
        raise OSError(str(error) or type(error).__name__) from error


def _bounded(file: BinaryIO, location: str) -> bytes:
    """What can be read in time."""
    text, ends = bytearray(), time.monotonic() + TIMEOUT_S
    while chunk := file.read1(CHUNK_BYTES):  # type: ignore[attr-defined]
        text += chunk
        if len(text) > MAX_BYTES:
            raise UsageError(f"{location} is longer than {MAX_BYTES:,} bytes", fix="tell its publisher")
        if time.monotonic() > ends:
            raise OSError(f"it is not read within {TIMEOUT_S:.0f} s")
    return bytes(text)
