"""A section is a section: nothing else, however empty, stands for its defaults."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Annotated, Any, Union, get_args, get_origin

import pytest
from nemorl.config import Config
from nemorl.errors import NemorlError
from nemorl.plugins.registry import config_bases, registry
from pydantic import ValidationError

FALSY = (0, 0.0, False, "", [], ())
SEQUENCES = (list, tuple)


def every_class() -> list[type[Config]]:
    """Config classes of all installed plugins and of their sections."""
    found: dict[type[Config], None] = {}
    for kind in [*config_bases(), "algorithms"]:
        for entry in registry().index.of_kind(kind):
            try:
                found |= dict.fromkeys(sections_of(registry().load(kind, entry.name), set()))
            except NemorlError:
                continue  # of a test of its own
    return sorted(found, key=lambda one: (one.__module__, one.__qualname__))


def sections_of(owner: type[Config], seen: set[type[Config]]) -> Iterator[type[Config]]:
    if owner in seen:
        return
    seen.add(owner)
    yield owner
    for field in owner.model_fields.values():
        for inner in configs_in(field.annotation):
            yield from sections_of(inner, seen)


def configs_in(annotation: Any) -> Iterator[type[Config]]:
    """Those that a type is made of."""
    if isinstance(annotation, type) and issubclass(annotation, Config):
        yield annotation
    for part in get_args(annotation):
        yield from configs_in(part)


def is_one_section(annotation: Any) -> bool:
    """A config, or a config or nothing; not several."""
    if get_origin(annotation) in (Union, types.UnionType):
        return any(map(is_one_section, get_args(annotation)))
    if get_origin(annotation) is Annotated:
        return is_one_section(get_args(annotation)[0])
    return isinstance(annotation, type) and issubclass(annotation, Config)


CLASSES = every_class()
FIELDS = [
    (owner, name)
    for owner in CLASSES
    for name, field in owner.model_fields.items()
    if any(True for _ in configs_in(field.annotation))
]


def test_there_are_many() -> None:
    names = {f"{owner.__name__}.{name}" for owner, name in FIELDS}
    assert len(CLASSES) > 100
    assert {"GRPOConfig.policy", "GRPOConfig.environment", "PolicyConfig.optimizer", "PluginsConfig.hooks"} <= names


@pytest.mark.parametrize("value", FALSY, ids=repr)
def test_nothing_empty_stands_for_a_section(value: object) -> None:
    accepted = []
    for owner, name in FIELDS:
        if isinstance(value, SEQUENCES) and not is_one_section(owner.model_fields[name].annotation):
            continue  # no sections are some
        try:
            owner.model_validate({name: value})
        except ValidationError as error:
            if any(item["loc"][:1] == (name,) for item in error.errors()):
                continue
        accepted.append(f"{owner.__name__}.{name}")
    assert not accepted
