"""Reads configs of the reference system as it does: ``defaults:`` first, then the file itself, interpolations last.

``defaults`` names one file or several, relative to the file that names them. Mappings merge deeply, lists are replaced,
later files win. A mapping with ``_override_: true`` replaces what its parents have there. Interpolations are resolved
when all is merged, so that a child's value reaches what its parents compute from it. Meaning is none of its business.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nemorl.errors import DataError
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

OVERRIDE = "_override_"
RESOLVERS = {
    "mul": lambda *factors: math.prod(factors),
    "add": lambda *terms: sum(terms),
    "div": lambda dividend, divisor: dividend / divisor,
    "max": lambda *values: max(values),
    "min": lambda *values: min(values),
}
"""Functions in interpolations, as in ``${mul:${policy.max_total_sequence_length}, 4}``."""


def read(path: Path) -> dict[str, Any]:
    """A config file with its parents, resolved to plain data.

    Raises:
        DataError: a file is missing or no YAML mapping, files name each other in a circle, or an interpolation leads
            nowhere.
    """
    return resolve(_merged(path, ()), str(path))


def resolve(data: Mapping[str, Any] | DictConfig, source: str = "config") -> dict[str, Any]:
    """A merged config with its interpolations computed."""
    with _resolvers():
        try:
            tree = data if isinstance(data, DictConfig) else OmegaConf.create(dict(data))
            plain = OmegaConf.to_container(tree, resolve=True)
        except OmegaConfBaseException as error:
            message = " ".join(str(error).split())
            raise DataError(f"{source}: {message}", fix="give the value it refers to, or write it out") from error
    assert isinstance(plain, dict), "a mapping stays one"
    return {str(key): value for key, value in plain.items()}


def _merged(path: Path, children: tuple[Path, ...]) -> DictConfig:
    """The file on top of its parents, markers and ``defaults`` removed, interpolations as they are."""
    path = path.expanduser().resolve()
    if path in children:
        circle = " -> ".join(child.name for child in (*children, path))
        raise DataError(f"configs name each other as defaults: {circle}", fix="remove one of these `defaults`")
    if not path.is_file():
        by = f", which {children[-1].name} names in `defaults`" if children else ""
        raise DataError(f"no config file {str(path)!r}{by}", fix="give the path of a YAML file")
    try:
        own = OmegaConf.load(path)
    except (YAMLError, OmegaConfBaseException, RecursionError, ValueError) as error:
        raise DataError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(own, DictConfig):
        raise DataError(f"{path} holds no mapping", fix="give a config file of the reference system")
    named = OmegaConf.to_container(OmegaConf.create({"it": own.pop("defaults", [])}))
    assert isinstance(named, dict), "made as one"
    parents = [named["it"]] if isinstance(named["it"], str) else named["it"] or []
    merged: Any = OmegaConf.create({})
    for parent in parents:
        merged = OmegaConf.merge(merged, _merged(path.parent / parent, (*children, path)))
    for key in list(_replacing(own)):
        _remove(merged, key)
    result = OmegaConf.merge(merged, own)
    assert isinstance(result, DictConfig), "mappings merge to a mapping"
    return result


def _replacing(node: DictConfig, prefix: str = "") -> Iterator[str]:
    """Paths of the mappings marked as replacing; the markers are removed."""
    if node.pop(OVERRIDE, False):
        yield prefix
    for key in list(node):
        child = node._get_node(key)
        if isinstance(child, DictConfig) and not child._is_none() and not child._is_interpolation():
            yield from _replacing(child, f"{prefix}.{key}" if prefix else str(key))


def _remove(tree: Any, path: str) -> None:
    parent, _, key = path.rpartition(".")
    holder = OmegaConf.select(tree, parent) if parent else tree
    if isinstance(holder, DictConfig):
        holder.pop(key, None)


@contextmanager
def _resolvers() -> Iterator[None]:
    """The functions of interpolations; OmegaConf keeps one table of them per process, which is left as it was."""
    ours = [name for name in RESOLVERS if not OmegaConf.has_resolver(name)]
    for name in ours:
        OmegaConf.register_resolver(name, RESOLVERS[name])
    try:
        yield
    finally:
        for name in ours:
            OmegaConf.clear_resolver(name)
