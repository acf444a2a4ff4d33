"""A mapping as a file or a caller gives it, and changes to it by dotted path, before anything knows what it means."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from nemorl.base.text.reading import (
    UnreadableError,
    check_tree,
    expanded,
    is_folder,
    parse_json,
    read_text,
    shown,
    unshared,
)
from nemorl.errors import ConfigError, ConfigIssue


def read_source(source: str | Path | Mapping[str, Any]) -> dict[str, Any]:
    """The raw mapping of a config file or mapping."""
    if isinstance(source, Mapping):
        own: dict[str, Any] = unshared(checked(source, "config"))
        return own
    path = expanded(source)
    if not os.path.exists(path):
        nearby = ", ".join(sorted(p.name for p in path.parent.glob("*.y*ml"))[:8]) if is_folder(path.parent) else ""
        fix = f"files here: {nearby}" if nearby else "give the path of a .yaml or .json file"
        raise ConfigError([ConfigIssue("", "there is no such file", fix)], source=str(path)[:200])
    try:
        text = read_text(path)
    except UnreadableError as error:
        raise ConfigError(
            [ConfigIssue("", str(error), "give a .yaml or .json file in UTF-8")], source=str(path)
        ) from error
    form = path.suffix[1:].lower()
    from nemorl.base.text.yaml_text import parse_yaml

    try:
        data = parse_json(text) if form == "json" else parse_yaml(text)
        check_tree(data)
    except UnreadableError as error:
        raise ConfigError([ConfigIssue("", f"not valid {form or 'YAML'}: {error}")], source=str(path)) from error
    if not isinstance(data, dict):
        found = "nothing" if data is None else f"a {type(data).__name__}"
        fix = "write `key: value` lines, starting with `algorithm:`"
        raise ConfigError([ConfigIssue("", f"expected a mapping, found {found}", fix)], source=str(path))
    return data


def checked(data: Mapping[str, Any], source: str) -> dict[str, Any]:
    """The mapping, if it is one that a file could hold.

    Raises:
        ConfigError: it is too deep, holds itself, or has keys that are no text.
    """
    try:
        check_tree(data)
    except UnreadableError as error:
        raise ConfigError([ConfigIssue("", str(error))], source=source) from error
    return dict(data)


def apply_overrides(data: dict[str, Any], overrides: Sequence[str], source: str = "config") -> dict[str, Any]:
    """``policy.optimizer.lr=1e-5`` on the raw mapping. A component given by name becomes a mapping on the way."""
    from nemorl.base.text.yaml_text import parse_yaml

    problems = []
    for override in overrides:
        path, equals, text = override.partition("=")
        named = f"override {shown(override)}"
        keys = path.strip().split(".")
        if not equals or not all(keys):
            problems.append(ConfigIssue("", f"{named} is not `path=value`", "e.g. policy.precision=bfloat16"))
            continue
        target: Any = data
        for key in keys[:-1]:
            below = target.get(key)
            if isinstance(below, str):
                below = {"name": below}
            target[key] = target = {} if below is None else below
            if not isinstance(target, dict):
                problems.append(ConfigIssue(path, f"{named} goes through {key!r}, which is not a mapping"))
                break
        else:
            try:
                target[keys[-1]] = parse_yaml(text)
            except UnreadableError as error:
                message = f"the value of {named} is not valid YAML: {error}"
                problems.append(ConfigIssue(path, message, "put it in quotes"))
    if problems:
        raise ConfigError(problems, source=source)
    return data


def differences(old: Any, new: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """The dotted paths at which two mappings differ, with what each has there; ``None`` for a key that one lacks.

    >>> list(differences({"a": 1, "b": {"c": 2}}, {"a": 1, "b": {"c": 3}}))
    [('b.c', 2, 3)]
    """
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted({*old, *new}):
            yield from differences(old.get(key), new.get(key), f"{path}.{key}" if path else key)
    elif old != new:
        yield path, old, new
