"""Finding plugins in indexes, and what is to know before one installs one."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from nemorl import __version__
from nemorl.base.packages.plugin_policy import machine_policy, normalize
from nemorl.base.packages.standard_plugins import how_to_install
from nemorl.base.text.suggest import closest
from nemorl.plugins import registry
from nemorl_trust.site_policy import refusal

from nemorl_cli.directory.indexes import OWN, ReadIndex
from nemorl_cli.directory.listing import Listing, PluginIndex, Release

NEAR = 3
"""Names that are proposed where nothing is found."""


@dataclass(frozen=True)
class Found:
    """One listing that a search is about."""

    listing: Listing
    index: PluginIndex
    location: str
    parts: tuple[tuple[str, str, str], ...]
    """Kind, name and summary of the parts that the words and the kind are about; of all, where only the rest is."""
    rank: int
    """Lower is nearer to what was asked."""

    @property
    def is_own(self) -> bool:
        """It comes with nemorl."""
        return self.location == OWN

    @property
    def release(self) -> Release:
        """The version to install here."""
        return self.listing.release_for(nemorl=__version__, python=platform.python_version())

    @property
    def problems(self) -> list[str]:
        """Why it cannot be used here."""
        found = self.release.problems_with(nemorl=__version__, python=platform.python_version())
        blocked = machine_policy().refusal(self.listing.name)
        denied = refusal("install", normalize(self.listing.name))
        return [*found, *([f"blocked: {blocked}"] if blocked else []), *([denied.message] if denied else [])]

    @property
    def installed(self) -> str | None:
        """The version that is installed here."""
        return _installed().get(normalize(self.listing.name))

    @property
    def install(self) -> str:
        """The command that installs it."""
        if self.is_own:
            return how_to_install(self.listing.name)
        return f"nemorl plugins install {self.listing.name}=={self.release.version}"

    def as_dict(self) -> dict[str, Any]:
        return {
            **self.listing.model_dump(mode="json"),
            "index": self.index.name,
            "location": self.location,
            "matches": [f"{kind}:{name}" for kind, name, _ in self.parts],
            "release": self.release.version,
            "installed": self.installed,
            "problems": self.problems,
            "install": self.install,
        }


def search(words: Sequence[str], indexes: Sequence[ReadIndex], kind: str | None = None) -> list[Found]:
    """Listings of which each word stands somewhere: in the name, the summary, or a part's name, kind or summary.

    Args:
        words: In any case; hyphens and underscores are the same.
        indexes: Where to look.
        kind: Only distributions with parts of this kind, and these parts.
    """
    wanted = [_folded(word) for word in words]
    found = [
        hit
        for each in indexes
        for listing in (each.index.plugins if each.index is not None else ())
        if each.index is not None and (hit := _hit(listing, each.index, each.location, wanted, kind))
    ]
    return sorted(found, key=lambda hit: (hit.rank, normalize(hit.listing.name)))  # nemorl's own before others'


def near_misses(words: Sequence[str], indexes: Sequence[ReadIndex]) -> list[str]:
    """Names that a word may be a slip of."""
    names = {name for each in indexes if each.index for listing in each.index.plugins for name in _names(listing)}
    found: list[str] = []
    for word in words:
        while len(found) < NEAR and (guess := closest(word, sorted(names - set(found)))):
            found.append(guess)
    return found


def _hit(listing: Listing, index: PluginIndex, location: str, words: Sequence[str], kind: str | None) -> Found | None:
    parts = [
        (group, name, summary)
        for group, named in listing.parts.items()
        if kind in (None, group)
        for name, summary in named.items()
    ]
    if not parts and kind is not None:
        return None
    about = [_folded(listing.name), _folded(listing.summary)]
    texts = {part: _folded(" ".join(part)) for part in parts}
    if not all(any(word in text for text in (*about, *texts.values())) for word in words):
        return None
    own = [part for part, text in texts.items() if words and any(word in text for word in words)]
    return Found(listing, index, location, tuple(own or parts), _rank(listing, own, words))


def _rank(listing: Listing, parts: Sequence[tuple[str, str, str]], words: Sequence[str]) -> int:
    """0: a name is the word, 1: a name begins with it, 2: it stands in a name, 3: elsewhere."""
    names = [_folded(name) for name in (listing.name, listing.name.removeprefix("nemorl-"), *(p[1] for p in parts))]
    tests: Sequence[Callable[[str, str], bool]] = (str.__eq__, str.startswith, str.__contains__)
    ranks = (rank for rank, test in enumerate(tests) if any(test(name, word) for name in names for word in words))
    return next(ranks, len(tests))


def _names(listing: Listing) -> Iterator[str]:
    yield listing.name
    for named in listing.parts.values():
        yield from named


def _folded(text: str) -> str:
    return text.lower().replace("_", "-").replace(" ", "-")


def _installed() -> dict[str, str]:
    return {normalize(entry.distribution): entry.version for entry in registry().index.entries}
