"""nemorl's names for those of TRL, verl and OpenRLHF, for messages of errors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from nemorl_compat.peers.tables import NEUTRAL, SYSTEMS, Entry, Table, table
from nemorl_compat.systems import NEMO_RL, NEMORL, seems_from

FEW = 2
"""Keys inside an unknown section that are explained one by one."""
SECTIONS = ("", "policy", "policy.optimizer", "policy.schedule", "generation", "validation", "checkpoint")
"""Sections of a nemorl config where somebody may write a flat key of another system."""

OFFLINE = {"sft": "sft", "dpo": "dpo", "kto": "kto", "orpo": "orpo", "simpo": "cpo"}
"""Algorithm that samples nothing -> the family of other systems that has its keys."""


def foreign_words(kind: str, name: str, value: Any = None, algorithm: Any = None) -> str | None:
    """Say what to do here about a name of another training system; ``None`` where it is of none that is known.

    Args:
        kind: ``key`` of a config, ``column`` of a dataset, ``reward``: the parameters of a function, or ``config``.
        name: A dotted key, a column, the names of parameters with a space between, or a config's file.
        value: What stands under the key; the whole config.
        algorithm: Of the config that has the key.

    Example:
        >>> foreign_words("key", "learning_rate")
        "TRL's `learning_rate` lives at policy.optimizer.lr"
        >>> foreign_words("column", "ability")
        '`ability` is of verl: nothing reads it; a reward gets it as the parameter `ability`'
    """
    family = OFFLINE.get(str(algorithm), "grpo")
    known = [table(system) for system in SYSTEMS]
    if kind == "config":
        return _of_config(name, value)
    if kind == "column":
        return next((f"`{name}` is of {t.system}: {t.columns[name]}" for t in known if name in t.columns), None)
    if kind == "reward":
        named = set(name.split())
        return next((said for t in known for convention, said in t.rewards if convention <= named), None)
    path = ".".join(part.lstrip("-") for part in name.split("."))
    return next((found for t in known if (found := _of_key(t, path, value, family)) is not None), None)


def _of_config(file: str, config: Mapping[str, Any]) -> str | None:
    """A whole config that another system reads."""
    name = seems_from(config)
    if name in (None, NEMORL):
        return None
    command = next((table(system).command for system in SYSTEMS if table(system).system == name), None)
    if command is None and name != NEMO_RL:
        return f"this is a config of {name}, which nemorl does not read: begin with one of `nemorl config templates`"
    options = "" if command is None else f" --from {command}"
    return f"this is a config of {name}: `nemorl config migrate{options} {file}` translates it"


def _of_key(system: Table, path: str, value: Any, family: str) -> str | None:
    if isinstance(value, Mapping) and value:
        return _of_section(system, path, value, family)
    section, _, key = path.rpartition(".")
    is_whole = system.is_nested or path in system.aliases
    name = path if is_whole else key if section in SECTIONS else None
    if name is None:
        return None
    entry = system.find(name, family)
    entry = entry or (_by_ending(system, path) if system.is_nested and section else None)
    if entry is None or entry.row.get("to") == path:  # a key of nemorl's own, which only this algorithm has not
        return None
    return f"{system.system}'s `{name}` {_said(entry)}"


def _of_section(system: Table, path: str, value: Mapping[str, Any], family: str) -> str | None:
    """A whole section that is unknown: its keys, where they are few, else the command that reads them all."""
    found = [words for key in _leaves(value, path) if (words := _of_key(system, key, None, family)) is not None]
    if not found:
        return None
    if len(found) <= FEW:
        return "; ".join(found)
    return f"this is a section of {system.system}: `nemorl config migrate --from {system.command} FILE` translates it"


def _leaves(value: Mapping[str, Any], prefix: str) -> Iterator[str]:
    for key, below in value.items():
        path = f"{prefix}.{key}"
        if isinstance(below, Mapping) and below:
            yield from _leaves(below, path)
        else:
            yield path


def _by_ending(system: Table, path: str) -> Entry | None:
    """``rollout.n`` for ``actor_rollout_ref.rollout.n``."""
    return next((e for e in system.entries for key in e.keys if "*" not in key and key.endswith(f".{path}")), None)


def _said(entry: Entry) -> str:
    row = entry.row
    if row.get("to") and row.get("neutral") != "same":
        return f"lives at {row['to']}" + (f": {row['says']}" if "says" in row else "")
    if "says" in row:
        return f"has no counterpart: {row['says']}"
    if "neutral" in row:
        return f"needs no counterpart: {NEUTRAL[row['neutral']]}"
    if "missing" in row:
        return f"is not supported where it asks for {row['missing']}; leave it out otherwise"
    return f"has no counterpart: {row['differs']}"
