"""The tables of other training systems as data: ``trl.yaml``, ``verl.yaml``, ``openrlhf.yaml`` of this folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files
from typing import Any

from nemorl_compat.key_table import unbraced

SYSTEMS = ("trl", "verl", "openrlhf")
"""Names of the tables, as ``nemorl config migrate --from`` takes them."""
NEUTRAL: Mapping[str, str] = {
    "same": "it is what nemorl does anyway",
    "inactive": "it belongs to what is turned off or not used",
    "speed": "it is about speed and memory alone",
    "engine": "it is a knob of an engine; it changes no result",
    "record": "it is about logs, names and file formats",
}
"""Why nothing has to be said here: the groups of ``neutral``."""


@dataclass(frozen=True)
class Entry:
    """One row of a table, for all keys that it names."""

    keys: tuple[str, ...]
    """Dotted; ``*`` stands for anything"""
    row: Mapping[str, Any]
    """As it is written"""

    def matches(self, key: str) -> bool:
        return any(fnmatchcase(key, pattern) for pattern in self.keys)

    @property
    def only(self) -> tuple[str, ...]:
        """Families of algorithms that it is about; none: all."""
        return tuple(self.row.get("only", ()))


@dataclass(frozen=True)
class Table:
    """All that is known of one system."""

    system: str
    """As people write it"""
    command: str
    columns: Mapping[str, str]
    """Column of its datasets -> what to do"""
    rewards: tuple[tuple[frozenset[str], str], ...]
    """Parameters of its reward functions, and what to do"""
    aliases: Mapping[str, str]
    """Another name of a key -> the one that the rows have"""
    entries: tuple[Entry, ...]
    """In the order of the file: the first that matches counts"""
    options: Mapping[str, tuple[Any, ...]]
    """Every option of the system and its default; several where parts of it have others"""

    @property
    def is_nested(self) -> bool:
        """Its keys have sections; those of the others are arguments of a command."""
        return "." in self.entries[0].keys[0]

    def find(self, key: str, family: str | None = None) -> Entry | None:
        """The row of a key; of one family of algorithms, if that is known."""
        key = self.aliases.get(key, key)
        found = (entry for entry in self.entries if entry.matches(key) and self._means(entry, key))
        return next((entry for entry in found if family is None or not entry.only or family in entry.only), None)

    def _means(self, entry: Entry, key: str) -> bool:
        """A pattern stands for options that there are; for any, where the row says that its keys are ``open``."""
        return key in entry.keys or key in self.options or bool(entry.row.get("open"))


@cache
def table(name: str) -> Table:
    """One of the tables, by its name in ``SYSTEMS``."""
    import yaml

    data = yaml.load((files("nemorl_compat.peers") / f"{name}.yaml").read_text(encoding="utf-8"), yaml.CSafeLoader)
    rewards = tuple((frozenset(item["parameters"]), item["says"]) for item in data["rewards"])
    entries = tuple(Entry(tuple(unbraced(row["key"])), row) for row in data["rows"])
    aliases = data.get("aliases", {})
    options = {aliases.get(option, option): said for option, said in _options(data["options"]).items()}
    return Table(data["system"], data["command"], data["columns"], rewards, aliases, entries, options)


def _options(name: str) -> dict[str, tuple[Any, ...]]:
    """A list of options: name, type and default with tabs between; several defaults with bars between."""
    lines = (files("nemorl_compat.peers") / name).read_text(encoding="utf-8").splitlines()
    rows = [line.split("\t") for line in lines if line and not line.startswith("#")]
    return {key: tuple(map(json.loads, said.split(" | "))) for names, _, said in rows for key in unbraced(names)}
