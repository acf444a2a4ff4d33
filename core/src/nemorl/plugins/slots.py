"""Slots: places that an installed package may fill, each with the type of what fits.

Whoever needs something declares a slot; whoever has it fills the slot by an entry point in the group ``nemorl.slots``::

    OPEN_DATA: Slot[OpenData] = Slot("open_data")              # nemorl.contracts.slots
    open_data = "nemorl_rl.data.rows:open_data"                # pyproject.toml of nemorl-rl

Slots that reading a config needs stand here, those of a run in :mod:`nemorl.contracts.slots`, those of a toolkit in its
``slots.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from nemorl.plugins.registry import registry

if TYPE_CHECKING:
    from nemorl.errors import ConfigIssue

S = TypeVar("S")


@dataclass(frozen=True)
class Slot(Generic[S]):
    """A place for one thing of type ``S``.

    Example:
        >>> Slot[Callable[[], str]]("nobody_fills_this").filled() is None
        True
    """

    name: str

    def filled(self) -> S | None:
        """The thing of the first distribution that has it and that the policy admits; ``None`` where there is none."""
        point = registry().index.slots.get(self.name)
        return None if point is None else point.load()

    def of(self, key: str) -> Slot[S]:
        """The slot for one of several things of this type: ``CONFIG_SECTION.of("launch")``."""
        return Slot(f"{self.name}.{key}")


@dataclass(frozen=True)
class ConfigSection:
    """A section of a config's file that is no part of the run itself, such as ``launch``."""

    read: Callable[[Mapping[str, Any]], tuple[dict[str, Any], list[ConfigIssue]]]
    """The config without the section, with what it says of the run; and what is wrong in it."""
    schema: Callable[[], dict[str, Any]]
    """Its JSON schema."""


@dataclass(frozen=True)
class OtherSpellings:
    """Ways to write a plugin of some kind besides its name: a preset, a path, several by name."""

    expand: Callable[[Mapping[str, Any], Sequence[str]], Mapping[str, Any] | None]
    """A mapping whose ``name`` no plugin has, spelled with the name of an installed one (their names are the second
    argument); ``None`` where nothing is known of it."""
    schemas: Callable[[Sequence[str]], list[dict[str, Any]]]
    """Their JSON schemas, given the names of installed plugins."""


CONFIG_SECTION: Slot[ConfigSection] = Slot("config_section")
"""``of`` the section's key."""
OTHER_SPELLINGS: Slot[OtherSpellings] = Slot("other_spellings")
"""``of`` a kind of plugins."""
FOREIGN_WORDS: Slot[Callable[..., str | None]] = Slot("foreign_words")
"""``(kind, name, *context)``: what a name of another training system is called here."""


def foreign_words(kind: str, names: Iterable[str], *context: Any) -> str | None:
    """The answer of an installed package about the first of ``names`` (of keys, columns, …) that another system has."""
    words = FOREIGN_WORDS.filled()
    return next((said for name in names if words and (said := words(kind, str(name), *context))), None)
