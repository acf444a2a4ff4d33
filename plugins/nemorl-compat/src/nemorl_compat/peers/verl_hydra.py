"""verl's command line and YAML as one flat mapping: Hydra composes them, on top of the configs that come with verl."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from nemorl.base.text.reading import UnreadableError
from nemorl.base.text.yaml_text import parse_yaml

from nemorl_compat import legacy_yaml
from nemorl_compat.peers import hydra
from nemorl_compat.peers.tables import table

MODEL_ENGINE = "model_engine"
"""Group whose member says how a model is trained; the base of all that ``verl.trainer.main_ppo`` takes."""
KNOWN = {
    "": ("ppo_trainer", "ppo_megatron_trainer"),
    MODEL_ENGINE: ("dp", "megatron", "torchtitan", "veomni"),
}
"""Configs that come with verl."""


def of_command(words: Sequence[str], folder: Path) -> dict[str, Any]:
    """The arguments of ``verl.trainer.main_ppo``; configs are looked for here, and in the folder of the script."""
    return _flattened(hydra.compose(words, [Path.cwd(), folder], known=KNOWN))


def of_file(path: Path) -> dict[str, Any]:
    """A YAML file that a run was started with, or that Hydra wrote of one."""
    return _flattened(hydra.compose_file(path, known=KNOWN))


def _flattened(composed: hydra.Composed) -> dict[str, Any]:
    choices = dict(composed.choices)
    if "ppo_megatron_trainer" in composed.bases:
        choices.setdefault(MODEL_ENGINE, "megatron")
    resolved = legacy_yaml.resolve(_over(_defaults(), composed.values), "the config")
    values: dict[str, Any] = dict(choices)
    for key, _ in flat(composed.values, "verl"):
        found = _at(resolved, key)
        values |= dict(flat({key: found}, "verl"))  # an interpolation may stand for a whole section
    return values


def _over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        there = merged.get(key)
        merged[key] = _over(there, value) if isinstance(there, Mapping) and isinstance(value, Mapping) else value
    return merged


def _at(tree: Any, key: str) -> Any:
    for part in key.split("."):
        tree = tree.get(part) if isinstance(tree, Mapping) else None
    return tree


@cache
def _defaults() -> dict[str, Any]:
    """verl's own values, to which interpolations may refer."""
    tree: dict[str, Any] = {}
    for key, values in table("verl").options.items():
        *parents, last = key.split(".")
        place = tree
        for parent in parents:
            if not isinstance(place.get(parent), dict):
                place[parent] = {}
            place = place[parent]
        place.setdefault(last, values[0])
    return tree


# Nested configs as one mapping of dotted keys, and text as the values that it stands for


_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")


def flat(data: Mapping[str, Any], system: str, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in data.items():
        if system == "verl" and isinstance(value, Mapping) and value:
            yield from flat(value, system, f"{prefix}{key}.")
        elif key != "_target_":
            yield f"{prefix}{key}", scalar(value) if isinstance(value, str) else value


def scalar(text: str) -> Any:
    """``1e-6`` is a number, ``True`` is true, ``[a,b]`` a list; all else is text."""
    if _NUMBER.fullmatch(text):
        return float(text) if re.search(r"[.eE]", text) else int(text)
    words = {"true": True, "false": False, "null": None}  # `none` is a word that many options take
    if text.lower() in words:
        return words[text.lower()]
    if text[:1] in ("[", "{"):
        try:
            return parse_yaml(text)
        except UnreadableError:
            return text
    return text
