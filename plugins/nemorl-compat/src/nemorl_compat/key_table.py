"""Fates of the keys of a NeMo RL config: the table in ``keys/*.yaml``, and how a key and its value are judged.

A row names keys and says, in this order:

    if / unless, neutral    where another key has one of these values, this one changes nothing here
    values, same_as         with these values, or that of another key, it says what nemorl does anyway
    to                      it is mapped, if its value is one of ``mapped_values``, none of ``mapped_unless``
    differs                 nemorl does something else, and the sentence says what (for ``differs_values``)
    missing                 nemorl cannot do it: the feature by name
    neutral                 a group: it changes nothing here, whatever its value

``part`` names the function that maps it where the value itself is not enough, ``default`` is what NeMo RL takes where
the key is absent, and ``proof``, ``with``, ``base``, ``at``, ``absent`` are for the test that changes each mapped key.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files
from typing import Any, Literal

import yaml
from nemorl.base.text.suggest import did_you_mean

from nemorl_compat.features import feature_of
from nemorl_compat.old_config import XTOKEN, OldConfig, without_number

Kind = Literal["mapped", "neutral", "different", "missing", "unknown"]
GROUPS: Mapping[str, str] = {
    "same": "say what nemorl does anyway",
    "inactive": "belong to what is turned off or not used",
    "speed": "are about speed and memory alone",
    "engine": "are knobs of an engine without a counterpart here; they change no result",
    "record": "are about logs, names and file formats",
    "unread": "have no effect in NeMo RL either",
}
"""Why a key changes nothing, as the end of a sentence that begins with a number of keys."""


@dataclass(frozen=True)
class Outcome:
    """The fate of one key."""

    kind: Kind
    text: str = ""
    """The group, the consequence, the missing feature, or the hint for an unknown key"""
    to: str | None = None
    """Path of the new key"""


@dataclass(frozen=True)
class Row:
    """One row of the table; fields as in the module's docstring."""

    keys: tuple[str, ...]
    table: str
    to: str | None = None
    part: str | None = None
    only: tuple[str, ...] = ()
    neutral: str | None = None
    conditions: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    exceptions: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    values: tuple[Any, ...] = ()
    same_as: str | None = None
    mapped_values: tuple[Any, ...] | None = None
    mapped_unless: tuple[Any, ...] = ()
    mapped_keys: tuple[str, ...] | None = None
    mapped_if: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    differs: str | None = None
    differs_values: tuple[Any, ...] | None = None
    missing: str | None = None
    feature: str | None = None
    default: Any = None
    has_default: bool = False
    comes_first: bool = False
    is_open: bool = False
    proofs: tuple[Any, ...] = ()
    test: Mapping[str, Any] = field(default_factory=dict)

    def judge(self, key: str, value: Any, old: OldConfig) -> Outcome | None:
        """The fate of a key that the row names; ``None`` where a row that comes first has nothing to say."""
        if self._is_moot(key, old):
            return Outcome("neutral", self.neutral or "inactive")
        if self.comes_first:
            return None
        if is_among(value, self.values) or (self.same_as and is_among(value, (old.get(self.same_as, self.default),))):
            return Outcome("neutral", "same")
        if self.to is not None and self._is_mapped(key, value, old):
            return Outcome("mapped", to=self.to)
        if self.differs is not None and (self.differs_values is None or is_among(value, self.differs_values)):
            return Outcome("different", self.differs)
        if self.feature is not None or self.missing is not None:
            named = feature_of(self.feature, key, value) if self.feature else None
            return Outcome("missing", named or self.missing or key)
        return Outcome("neutral", self.neutral or "same")

    def means(self, key: str) -> bool:
        """A pattern that calls all keys neutral stands for options that there are; one that also refuses, for any."""
        says_more = self.to or self.differs or self.missing or self.feature
        return bool(self.is_open or says_more) or is_option(key)

    def _is_moot(self, key: str, old: OldConfig) -> bool:
        if self.comes_first and not self.conditions and not self.exceptions:
            return True
        if self.comes_first and (key in self.conditions or key in self.exceptions):
            return False  # a switch is judged by a row of its own
        holds = any(is_among(old.get(path), values) for path, values in self.conditions.items())
        return holds or any(not is_among(old.get(path), values) for path, values in self.exceptions.items())

    def _is_mapped(self, key: str, value: Any, old: OldConfig) -> bool:
        return (
            (self.mapped_values is None or is_among(value, self.mapped_values))
            and not is_among(value, self.mapped_unless)
            and (self.mapped_keys is None or key in self.mapped_keys)
            and all(is_among(old.get(path), values) for path, values in self.mapped_if.items())
        )


def is_among(value: Any, values: tuple[Any, ...]) -> bool:
    """Equal to one of them; ``True`` is not 1 and ``1`` is ``1.0``."""
    return any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in values)


def judge(old: OldConfig, key: str, value: Any) -> Outcome:
    """The fate of one key of a config."""
    key = without_number(key)
    for row in _rows_of(old.family, key):
        found = row.judge(key, value, old)
        if found is not None:
            return found
    if "." not in key and not isinstance(value, Mapping | list):
        return Outcome("neutral", "unread")  # a value that stands beside the sections serves interpolations only
    known = _known_keys(old.family)
    named = (pattern for row in rows(old.family) for pattern in row.keys)
    if value in (None, {}) and any(pattern.startswith(f"{key}.") for pattern in named):
        return Outcome("neutral", "inactive")  # a section that says nothing
    found = _of_another_model(old, key, value) or _of_an_environment(key, known)
    return found or Outcome("unknown", did_you_mean(key, sorted(known)) or "")


CRITICS_OWN = frozenset(
    [
        "backend",
        "precision",
        "tensor_parallel_size",
        "activation_checkpointing",
        "optimizer",
        "schedule",
        "max_grad_norm",
    ]
)
"""Settings of the policy that its critic may have in another way."""


def _of_another_model(old: OldConfig, key: str, value: Any) -> Outcome | None:
    """A key of the teacher or the critic that has no row of its own: as the policy's, which has to agree.

    Of the critic, what it has of its own goes to ``critic`` as the policy's goes to ``policy``.
    """
    part, _, rest = key.partition(".")
    if part not in ("teacher", "value") or not rest:
        return None
    there = judge(old.standing_for(part), f"policy.{rest}", value)
    if there.kind != "mapped":
        return there
    section, _, setting = (there.to or "").partition(".")
    if part == "value" and section == "policy" and setting.split(".")[0] in CRITICS_OWN:
        return Outcome("mapped", to=f"critic.{setting}")
    if is_among(value, (old.get(f"policy.{rest}"),)):
        return Outcome("neutral", "same")
    name = {"teacher": "teacher", "value": "critic"}[part]
    return Outcome("missing", f"a {name} with a `{rest}` of its own")


def _of_an_environment(key: str, known: frozenset[str]) -> Outcome | None:
    """A setting of an environment that has no rows: it is the environment that is missing."""
    section, _, rest = key.partition(".")
    name = rest.partition(".")[0]
    if section != "env" or any(other.startswith(f"env.{name}.") for other in known):
        return None
    return Outcome("missing", feature_of("environment", key, name) or name)


@cache
def _rows_of(family: str, key: str) -> tuple[Row, ...]:
    """The rows that name a key: those that come first, then the most specific."""
    ranked = [(_rank(row, key), row) for row in rows(family)]
    found = sorted(((rank, row) for rank, row in ranked if rank is not None), key=lambda pair: pair[0])
    return tuple(row for _, row in found)


def _matches(key: str, pattern: str, row: Row) -> bool:
    return "*" in pattern and fnmatchcase(key, pattern) and row.means(key)


def _rank(row: Row, key: str) -> tuple[bool, bool, int, bool] | None:
    patterns = [pattern for pattern in row.keys if pattern == key or _matches(key, pattern, row)]
    if not patterns:
        return None
    literal = max(len(pattern.replace("*", "")) for pattern in patterns)
    return not row.comes_first, key not in patterns, -literal, not row.only


@cache
def rows(family: str) -> tuple[Row, ...]:
    """The rows for configs of one family."""
    return tuple(_for_family(row, family) for row in all_rows() if not row.only or family in row.only)


def _for_family(row: Row, family: str) -> Row:
    section = "distillation" if family == XTOKEN else family

    def filled(text: str) -> str:
        return text.replace("{section}", section)

    keys = tuple(key for pattern in row.keys for key in unbraced(filled(pattern)))
    conditions = {filled(path): values for path, values in row.conditions.items()}
    return replace(row, keys=keys, conditions=conditions)


@cache
def all_rows() -> tuple[Row, ...]:
    """The whole table, in the order of its files."""
    return tuple(row for title, rows in tables().items() for row in rows)


@cache
def tables() -> Mapping[str, tuple[Row, ...]]:
    """Title of a section of the table -> its rows."""
    found = {}
    for name in ORDER:
        data = yaml.load((files("nemorl_compat") / "keys" / f"{name}.yaml").read_text(), yaml.CSafeLoader)
        found[data["title"]] = tuple(_row(item, data["title"]) for item in data["rows"])
    return found


RENAMED = {
    **{"key": "keys", "if": "conditions", "unless": "exceptions"},
    **{"first": "comes_first", "open": "is_open", "proof": "proofs"},
}
"""Fields of the table that a row has under another name."""
OF_TEST = frozenset(["with", "base", "at", "absent"])
ORDER = (
    "policy",
    "dtensor",
    "megatron",
    "generation",
    "loss",
    "loops",
    "data",
    "environments",
    "other_models",
    "evaluation",
    "run",
)
"""The files of the table."""


@cache
def options() -> Mapping[str, tuple[str, tuple[Any, ...]]]:
    """Every option of NeMo RL -> its type and its defaults: ``keys/options.tsv``."""
    lines = (files("nemorl_compat") / "keys" / "options.tsv").read_text(encoding="utf-8").splitlines()
    rows = [line.split("\t") for line in lines if not line.startswith("#")]
    return {
        name: (kind, tuple(json.loads(default) for default in defaults.split(" | ")))
        for names, kind, defaults in rows
        for name in unbraced(names)
    }


def is_option(key: str) -> bool:
    """NeMo RL has an option of this name, or one whose value is a mapping of free names that it is in.

    Of the critic and the teacher, what the policy has.
    """
    part, _, rest = key.partition(".")
    if part in ("value", "teacher"):
        return is_option(f"policy.{rest}")
    names = key.split(".")
    parents = (".".join(names[:end]) for end in range(1, len(names)))
    return key in options() or any(options().get(parent, ("",))[0] == "dict" for parent in parents)


def _row(item: Mapping[str, Any], table: str) -> Row:
    keys = item["key"] if isinstance(item["key"], list) else [item["key"]]
    said = {**item, "key": keys}
    test = {name: said.pop(name) for name in OF_TEST & said.keys()}
    given = {RENAMED.get(name, name): _frozen(value) for name, value in said.items() if name != "default"}
    return Row(**given, table=table, default=item.get("default"), has_default="default" in item, test=test)


def _frozen(value: Any) -> Any:
    """Lists as tuples, also those in a mapping."""
    if isinstance(value, Mapping):
        return {name: tuple(values) for name, values in value.items()}
    return tuple(value) if isinstance(value, list) else value


@cache
def _known_keys(family: str) -> frozenset[str]:
    return frozenset(key for row in rows(family) for key in row.keys if "*" not in key)


def unbraced(pattern: str) -> Iterator[str]:
    """``a.{b,c}.d`` -> ``a.b.d``, ``a.c.d``."""
    before, brace, rest = pattern.partition("{")
    if not brace:
        yield pattern
        return
    inside, _, after = rest.partition("}")
    for choice in inside.split(","):
        yield from unbraced(f"{before}{choice}{after}")
