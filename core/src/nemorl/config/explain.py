"""Mistakes in a config, explained: what is wrong, and the closest valid choice."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from nemorl.base.packages.standard_plugins import STANDARD_PLUGINS
from nemorl.base.text.pydantic_words import in_words
from nemorl.base.text.suggest import SURE, did_you_mean, in_other_words, nested
from nemorl.config.base import Config, variant
from nemorl.config.component import Component
from nemorl.errors import ConfigIssue, NemorlError
from nemorl.plugins import registry
from nemorl.plugins.index import singular
from nemorl.plugins.slots import foreign_words


def explain(config_class: type[Config], data: Mapping[str, Any], path: str, error: Mapping[str, Any]) -> ConfigIssue:
    """One pydantic error item as a :class:`ConfigIssue`."""
    if error["type"] == "extra_forbidden":
        return _unknown_key(config_class, data, path, error.get("input"))
    what, fix = in_words(error, path.rpartition(".")[2])
    owner = config_at(config_class, data, path) if fix == "give a mapping" else None
    return ConfigIssue(path, what, fix if owner is None else _mapping_of(path, owner, error.get("input")))


def _mapping_of(path: str, owner: type[Config], value: Any) -> str:
    """How a section is written, for somebody who wrote one value in its place."""
    fields = owner.model_fields
    key = next((name for name, info in fields.items() if value in _choices(info.annotation)), None)
    if key is not None:
        return f"write {nested(path, f'{key}: {value}')}"
    return f"give a mapping, {nested(path, 'KEY: VALUE')}, with keys of {', '.join(fields)}"


def _choices(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) is Literal else ()


def _unknown_key(config_class: type[Config], data: Mapping[str, Any], path: str, value: Any) -> ConfigIssue:
    parent, _, key = path.rpartition(".")
    owner = config_at(config_class, data, parent)
    choices = list(owner.model_fields) if owner is not None else []
    below = [known for known in field_paths(config_class) if known.startswith(f"{parent}." if parent else "")]
    guess = (
        foreign_words("key", [path], value, data.get("algorithm"))
        or _of_other_plugins(config_class, data, parent, key)
        or did_you_mean(key, choices, likeness=SURE)
        or _elsewhere(config_class, path, value)
        or did_you_mean(key, choices)
        or in_other_words(key, below)
        or (f"keys here: {', '.join(choices)}" if choices else None)
    )
    return ConfigIssue(path, f"unknown key in {parent or config_class.__name__}", guess)


def _elsewhere(config_class: type[Config], path: str, value: Any) -> str | None:
    """Where the sections have a key of this very name."""
    key = path.rpartition(".")[2]
    found = [known for known in field_paths(config_class) if known.rpartition(".")[2] == key and known != path]
    if not found:
        return None
    section = config_at(config_class, {}, found[0])
    if section is not None and not isinstance(value, Mapping):
        return f"this key lives at {found[0]}; {_mapping_of(found[0], section, value)}"
    return f"this key lives at {' or '.join(found[:2])}"


def _of_other_plugins(config_class: type[Config], data: Mapping[str, Any], parent: str, key: str) -> str | None:
    """Which well-known plugins have an option of this name, where one could stand here or in a section below."""
    above, _, field = parent.rpartition(".")
    owner, holder = config_at(config_class, data, parent), config_at(config_class, data, above)
    if owner is None or holder is None:
        return None
    for place, component in {
        parent: _component_of(holder, field),
        **{f"{parent}.{name}": _component_of(owner, name) for name in owner.model_fields if parent},
    }.items():
        if component is None:
            continue
        known = [
            name for kind, _, name in (entry.partition(":") for entry in STANDARD_PLUGINS) if kind == component.kind
        ]
        having = [name for name in known if key in getattr(_plugin_class(component, name), "model_fields", ())]
        if having:
            return f"{singular(component.kind)} {' and '.join(having)} has it: {place}: {{name: {having[0]}, {key}: …}}"
    return None


def _component_of(owner: type[Config], name: str) -> Component | None:
    info = owner.model_fields.get(name)
    if info is None:
        return None
    return next((item for item in info.metadata if isinstance(item, Component)), None) or _component_in(info.annotation)


def config_at(config_class: type[Config], data: Mapping[str, Any], path: str) -> type[Config] | None:
    """The config class that validates the mapping at ``path``; follows plugin names found in ``data``."""
    current: type[Config] | None = config_class
    value: Any = data
    component: Component | None = None
    for key in path.split(".") if path else []:
        if component is not None and isinstance(value, (list, tuple)) and key in map(str, range(len(value))):
            value = value[int(key)]
            current = _plugin_class(component, value)
            continue
        if current is None or key not in current.model_fields:
            return None
        value = value.get(key) if isinstance(value, Mapping) else None
        info = current.model_fields[key]
        component = _component_of(current, key)
        current = _plugin_class(component, value) if component else _config_in(info.annotation, value)
    return current


def field_paths(config_class: type[Config], prefix: str = "") -> Iterator[str]:
    """Dotted paths of all fields of the kernel's part of a config (plugin options excluded)."""
    for name, info in config_class.model_fields.items():
        yield prefix + name
        nested = _config_in(info.annotation)
        if nested is not None and not any(isinstance(item, Component) for item in info.metadata):
            yield from field_paths(nested, f"{prefix}{name}.")


def _plugin_class(component: Component, value: Any) -> type[Config] | None:
    try:
        spelled = component.spelled(value, registry())
        name = spelled.get("name") if isinstance(spelled, Mapping) else None
        found: type[Config] | None = registry().load(component.kind, name) if isinstance(name, str) else None
    except NemorlError:
        return None
    return found


def _members(annotation: Any) -> tuple[Any, ...]:
    origin = get_origin(annotation)
    return get_args(annotation) if origin in (Union, types.UnionType, tuple) else (annotation,)


def _component_in(annotation: Any) -> Component | None:
    for member in _members(annotation):
        if get_origin(member) is Annotated:
            for item in get_args(member)[1:]:
                if isinstance(item, Component):
                    return item
    return None


def _config_in(annotation: Any, value: Any = None) -> type[Config] | None:
    found = [member for member in _members(annotation) if isinstance(member, type) and issubclass(member, Config)]
    return variant(tuple(found), value) if found else None  # type: ignore[return-value]
