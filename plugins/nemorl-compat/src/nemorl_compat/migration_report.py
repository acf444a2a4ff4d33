"""A migration in words: some lines, a table of all keys, plain data, and the refusal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from textwrap import shorten
from typing import Any

from nemorl.base.text.secrets import Redactor
from nemorl.base.text.yaml_text import format_yaml
from nemorl.errors import UsageError

from nemorl_compat.key_table import GROUPS
from nemorl_compat.migration import Change, Migration

WIDTH = 160
"""Characters of a line of the short report."""
MOST_KEYS = 6
"""Keys that a refusal lists of one feature, and a summary of those with another meaning."""
TITLES = {
    "mapped": "mapped",
    "neutral": "neutral",
    "different": "different",
    "missing": "not supported",
    "unknown": "unknown",
}
"""Classes of keys, as users read them."""


def summary(migration: Migration) -> list[str]:
    """How many keys became what, what decided a script's branches, and what is different or lost, line by line."""
    keys = [change for change in migration.changes if not change.key.startswith("$")]
    lines = [f"{len(migration.of('mapped'))} of {len(keys)} keys mapped"]
    groups = Counter(change.outcome.text for change in migration.of("neutral"))
    if groups:
        parts = "; ".join(f"{count} {GROUPS[group]}" for group, count in groups.most_common())
        lines.append(f"{sum(groups.values())} keys change nothing here (--report lists them): {parts}")
    decided: list[Change] = []
    different: list[Change] = []
    for change in migration.of("different"):
        (decided if change.key.startswith("$") else different).append(change)
    if decided:
        parts = ", ".join(f"{change.key} = {_short(change.value)}" for change in decided)
        lines.append(shorten(f"the script was read with {parts}", WIDTH, placeholder=" … (--report lists them)"))
    if different:
        lines.append(f"{len(different)} different:" + (" (--report lists all)" if len(different) > MOST_KEYS else ""))
        lines += [f"  - {change.key}: {change.outcome.text}" for change in different[:MOST_KEYS]]
    if any(change.key.startswith("eval.") for change in keys):
        lines.append("it is an evaluation: `nemorl eval FILE` runs the new config")
    lost = [change.key for change in migration.of("missing", "unknown") if change.is_allowed]
    if lost:
        lines.append(shorten(f"{len(lost)} lost, as allowed: {', '.join(lost)}", WIDTH, placeholder=" …"))
    return lines


def table(migration: Migration) -> list[tuple[str, str, str]]:
    """Class, old key and value, new key and value or the reason, for every key."""
    order = list(TITLES)
    changes = sorted(migration.changes, key=lambda change: order.index(change.outcome.kind))
    return [(TITLES[change.outcome.kind], _old(change), _new(change, migration.config)) for change in changes]


def _old(change: Change) -> str:
    return f"{change.key} = {_short(change.value)}"


def _new(change: Change, config: Mapping[str, Any]) -> str:
    outcome = change.outcome
    if outcome.kind == "mapped" and outcome.to is not None:
        found = _at(config, outcome.to)
        return f"{outcome.to} = {_short(found)}" if found is not None else f"{outcome.to} (the default)"
    if outcome.kind == "neutral":
        return GROUPS[outcome.text]
    return outcome.text or "no such key is known"


def _short(value: Any) -> str:
    return shorten(" ".join(format_yaml(Redactor().data(value), one_line=True).split()), 48, placeholder="…")


def _at(tree: Any, path: str) -> Any:
    for key in path.split("."):
        if isinstance(tree, list | tuple) and key.isdecimal() and int(key) < len(tree):
            tree = tree[int(key)]
        elif isinstance(tree, Mapping):
            tree = tree.get(key)
        else:
            return tree if isinstance(tree, str) and key == "name" else None
    return tree


def as_data(migration: Migration) -> dict[str, Any]:
    """The whole migration as plain data, without secrets."""
    data: dict[str, Any] = Redactor().data(_as_data(migration))
    return data


def _as_data(migration: Migration) -> dict[str, Any]:
    return {
        "complete": migration.is_complete,
        "config": dict(migration.config),
        "missing": migration.features,
        "keys": [
            {
                "key": change.key,
                "value": change.value,
                "class": TITLES[change.outcome.kind],
                "to": change.outcome.to,
                "text": GROUPS.get(change.outcome.text, change.outcome.text),
                "allowed": change.is_allowed,
            }
            for change in migration.changes
        ],
        "problems": [{"path": p.path, "message": p.message, "fix": p.fix} for p in migration.problems],
    }


def refusal(migration: Migration, source: str) -> UsageError:
    """Why a config is not migrated: each missing feature with the keys that ask for it."""
    lines = [f"{source} is not migrated:"]
    by_feature: dict[str, list[Change]] = {}
    for change in migration.refused:
        is_missing = change.outcome.kind == "missing"
        by_feature.setdefault(change.outcome.text if is_missing else "", []).append(change)
    for feature, changes in by_feature.items():
        keys = ", ".join(_old(change) for change in changes[:MOST_KEYS])
        more = f" and {len(changes) - MOST_KEYS} more" if len(changes) > MOST_KEYS else ""
        if feature:
            lines.append(f"  - not supported: {feature} ({keys}{more})")
        else:
            lines += [f"  - unknown key {_old(change)}. {change.outcome.text}".rstrip() for change in changes]
    lines += [f"  - {problem}" for problem in migration.problems]
    fix = "--allow-loss KEY for each key that you can do without (patterns are allowed)"
    return UsageError("\n".join(lines), fix=fix if migration.refused else "correct the value in the old config")
