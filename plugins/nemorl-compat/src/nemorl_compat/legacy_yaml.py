"""Reads configs of the reference system as it does: ``defaults:`` first, then the file itself, interpolations last.

``defaults`` names one file or several, relative to the file that names them. Mappings merge deeply, lists are replaced,
later files win. A mapping with ``_override_: true`` replaces what its parents have there. Interpolations are resolved
when all is merged, so that a child's value reaches what its parents compute from it. Meaning is none of its business.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from nemorl.base.text.reading import expanded
from nemorl.errors import DataError
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import CSafeLoader, YAMLError

OVERRIDE = "_override_"
"""Marks a mapping that replaces its parents'."""
MANDATORY = "???"
"""A value that others must give: it replaces none."""
_VARIABLE = re.compile(r"\$\{oc\.env:\s*(\w+)\s*\}")
RESOLVERS = {
    "mul": lambda *factors: math.prod(factors),
    "add": lambda *terms: sum(terms),
    "div": lambda dividend, divisor: dividend / divisor,
    "max": lambda *values: max(values),
    "min": lambda *values: min(values),
}
"""Functions in interpolations, as in ``${mul:${policy.max_total_sequence_length}, 4}``."""


class _Loader(CSafeLoader):
    """PyYAML's fast loader, with numbers as OmegaConf reads them: ``1e-5`` is one."""


_Loader.yaml_implicit_resolvers = {**CSafeLoader.yaml_implicit_resolvers}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(?:\d[\d_]*)(?:\.[\d_]*)?[eE][-+]?\d+$"),
    list("-+0123456789"),
)


def read(path: Path, known: dict[Path, dict[str, Any]] | None = None) -> dict[str, Any]:
    """A config file with its parents, resolved to plain data.

    Args:
        path: The file.
        known: Files with their parents that have been read, to which this one is added: a tree shares its parents.

    Raises:
        DataError: a file is missing or no YAML mapping, files name each other in a circle, or an interpolation leads
            nowhere.
    """
    return resolve(_merged(path, (), {} if known is None else known), str(path))


def resolve(data: Mapping[str, Any], source: str = "config") -> dict[str, Any]:
    """A merged config with its interpolations computed."""
    with _resolvers():
        try:
            plain = OmegaConf.to_container(OmegaConf.create(_without_unset(dict(data))), resolve=True)
        except OmegaConfBaseException as error:
            message = " ".join(str(error).split())
            raise DataError(f"{source}: {message}", fix="give the value it refers to, or write it out") from error
    assert isinstance(plain, dict), "a mapping stays one"
    return {str(key): value for key, value in plain.items()}


def _without_unset(node: Any) -> Any:
    """Environment variables that are not set here, as ``$NAME``: they say something on another machine."""
    if isinstance(node, dict):
        return {key: _without_unset(value) for key, value in node.items()}
    if isinstance(node, list):
        return [_without_unset(value) for value in node]
    if not isinstance(node, str):
        return node
    return _VARIABLE.sub(lambda found: found[0] if found[1] in os.environ else f"${found[1]}", node)


def _merged(path: Path, children: tuple[Path, ...], known: dict[Path, dict[str, Any]]) -> dict[str, Any]:
    """The file on top of its parents, markers and ``defaults`` removed, interpolations as they are."""
    path = expanded(path).resolve()
    if path in children:
        circle = " -> ".join(child.name for child in (*children, path))
        raise DataError(f"configs name each other as defaults: {circle}", fix="remove one of these `defaults`")
    if path in known:
        return known[path]
    own = loaded(path, children)
    named = own.pop("defaults", None)
    parents = [named] if isinstance(named, str) else named or []
    if not isinstance(parents, list) or not all(isinstance(parent, str) for parent in parents):
        raise DataError(f"{path}: `defaults` is {parents!r}", fix="name one file, or a list of files")
    merged: dict[str, Any] = {}
    for parent in parents:
        merged = _over(merged, _merged(path.parent / parent, (*children, path), known))
    known[path] = _over(merged, own)
    return known[path]


def loaded(path: Path, children: tuple[Path, ...] = ()) -> dict[str, Any]:
    if not path.is_file():
        by = f", which {children[-1].name} names in `defaults`" if children else ""
        raise DataError(f"no config file {str(path)!r}{by}", fix="give the path of a YAML file")
    try:
        own = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except (YAMLError, RecursionError, ValueError, OSError) as error:
        raise DataError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    if own is not None and not isinstance(own, dict):
        raise DataError(f"{path} holds no mapping", fix="give a config file of NeMo RL")
    return own or {}


def _over(below: Any, above: Any) -> Any:
    """A child's value over its parents': mappings merge, unless they are marked as replacing; all else replaces."""
    if not isinstance(above, dict):
        return above
    replaces = bool(above.get(OVERRIDE))
    merged = dict(below) if isinstance(below, dict) and not replaces else {}
    for key, value in above.items():
        if key != OVERRIDE and not (value == MANDATORY and key in merged):
            merged[key] = _over(merged.get(key), value)
    return merged


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
