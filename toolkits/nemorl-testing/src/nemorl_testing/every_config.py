"""Checks of every plugin that is a config class: light, documented, strict, and the same after a journey."""

from __future__ import annotations

import inspect
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from typing import Any, get_args

from nemorl.base.text.field_texts import field_texts
from nemorl.base.text.naming import declared_kind, kind_by_name, takes_text
from nemorl.config import Config
from nemorl.config.component import Component
from nemorl.plugins.registry import config_bases

from nemorl_testing.kit import Subject, expect

HEAVY = ("torch", "transformers", "ray", "vllm", "megatron", "tensorflow", "jax", "numpy", "datasets")
"""Import names that a config module may not pull in."""
HEAVY_ONES = "heavy modules:"
SUMMARY_CHARACTERS = 120
UNKNOWN = "no_such_option"


def check_config_module_imports_nothing_heavy(subject: Subject) -> None:
    """Importing the config imports pydantic and nemorl only: no torch, transformers or ray. (DESIGN 4)"""
    module = subject.config_class.__module__
    done = _imported_alone(module)
    expect(done.returncode == 0, f"import {module} fails in a fresh interpreter: {done.stderr[-500:]}")
    heavy = done.stdout.rpartition(HEAVY_ONES)[2].split()  # the module may have printed before
    expect(not heavy, f"import {module} imports {', '.join(heavy)}")


def check_summary_is_one_line(subject: Subject) -> None:
    """``summary`` says in one line what the plugin is. (DESIGN 4)"""
    summary = subject.config_class.summary
    expect(summary.strip() and "\n" not in summary and len(summary) <= SUMMARY_CHARACTERS, f"summary = {summary!r}")


def check_required_modules_say_how_to_install_them(subject: Subject) -> None:
    """A plugin that needs other modules names the command that installs them. (DESIGN 4)"""
    needs = getattr(subject.config_class, "requires_modules", ())
    expect(isinstance(needs, tuple) and all(isinstance(n, str) for n in needs), f"requires_modules = {needs!r}")
    expect(not needs or subject.config_class.install_hint, f"requires_modules = {needs}, but install_hint is empty")


def check_every_option_is_documented(subject: Subject) -> None:
    """The class and each of its options have a docstring. (DESIGN 6)"""
    for owner in _config_classes(subject.config_class):
        expect(owner.__dict__.get("__doc__"), f"class {owner.__name__} has no docstring")
        bare = owner.model_fields.keys() - field_texts(owner).keys()
        expect(not bare, f"options of {owner.__name__} without a docstring: {', '.join(sorted(bare))}")


def check_options_that_name_something_declare_it(subject: Subject) -> None:
    """An option for a model, dataset, file, server, command, code or secret has a type that says so. (DESIGN 6)"""
    for owner in _config_classes(subject.config_class):
        missing = undeclared_names(owner)
        expect(
            not missing,
            f"options of {owner.__name__} that sound like {missing}: give them types of nemorl.config (ModelName, "
            "ServerURL, …; PlainText where one names nothing)",
        )


def check_unknown_option_is_refused(subject: Subject) -> None:
    """An option that does not exist is refused, and the error names it. (DESIGN 6)"""
    try:
        accepted = subject.config_class.model_validate({**_own_options(subject), UNKNOWN: 1})
    except ValueError as error:
        expect(UNKNOWN in str(error), f"the error does not name the option {UNKNOWN!r}: {error}")
    else:
        expect(False, f"{UNKNOWN}=1 was accepted: {accepted!r}"[:300])


def check_config_is_frozen(subject: Subject) -> None:
    """A config cannot be changed after it was validated. (DESIGN 6)"""
    expect(subject.config_class.model_config.get("frozen"), "model_config['frozen'] is not True")


def check_config_pickles(subject: Subject) -> None:
    """The config travels to workers by pickle and arrives equal. (DESIGN 4)"""
    arrived = pickle.loads(pickle.dumps(subject.config))
    expect(arrived == subject.config, f"{subject.config!r} arrived as {arrived!r}")


def check_config_loads_again_from_its_dump(subject: Subject) -> None:
    """The resolved config, written as JSON, loads again to the same config. (DESIGN 6)"""
    config = subject.config
    if subject.kind == "algorithms":
        text = json.dumps(config.model_dump(mode="json", exclude={"model"}))
        again = subject.config_class.model_validate(json.loads(text))
        # `model` is short for policy.model_name, which the dump holds.
        again = again.model_copy(update={"model": config.model})
    else:
        subject.require_modules()
        component = Component(subject.kind)
        text = json.dumps(component.dump(config))
        again = component.resolve(json.loads(text))
    expect(again == config, f"{config!r} was written as {text} and read as {again!r}"[:2000])


def check_json_schema_covers_every_option(subject: Subject) -> None:
    """Editors get a JSON schema with every option. (DESIGN 6)"""
    schema = json.loads(json.dumps(subject.config_class.model_json_schema()))
    missing = set(subject.config_class.model_fields) - set(schema.get("properties", {}))
    expect(not missing, f"the schema lacks {', '.join(sorted(missing))}")


def check_build_takes_what_the_kernel_gives(subject: Subject) -> None:
    """``build`` is defined, and takes the arguments that the kernel passes. (DESIGN 4)"""
    promised, own = config_bases()[subject.kind].build, subject.config_class.build  # type: ignore[attr-defined]
    is_inherited = own is promised and subject.kind != "algorithms"  # theirs is the kernel's, which asks `trainer`
    expect(not is_inherited, f"{subject.config_class.__name__} does not define build()")
    parameters = inspect.signature(promised).parameters.values()
    positional = [p.name for p in parameters if p.kind is not p.KEYWORD_ONLY]
    keywords = {p.name: p.name for p in parameters if p.kind is p.KEYWORD_ONLY}
    try:
        inspect.signature(own).bind(*positional, **keywords)
    except TypeError as error:
        expect(False, f"build{inspect.signature(own)} cannot be called as build{inspect.signature(promised)}: {error}")


def undeclared_names(owner: type[Config]) -> dict[str, str]:
    """Options with texts that by their names are for something that their types do not declare, and what it is."""
    found = {}
    for name, field in owner.model_fields.items():
        guess = kind_by_name(name)
        is_bare = takes_text(field.annotation) and declared_kind(field.annotation, field.metadata) is None
        if is_bare and guess not in (None, "text"):
            found[name] = str(guess)
    return found


@cache
def _imported_alone(module: str) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter that imports the module and prints which of ``HEAVY`` came with it."""
    code = f"import sys, {module}; print({HEAVY_ONES!r}, *sorted(set({HEAVY!r}) & set(sys.modules)))"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=120, check=False
    )


def _own_options(subject: Subject) -> dict[str, Any]:
    """Options that validate, as a mapping: for algorithms, those of the small run."""
    return (
        subject.config.model_dump(mode="json", exclude={"model"}) if subject.kind == "algorithms" else subject.options
    )


def _config_classes(owner: type[Config]) -> Iterator[type[Config]]:
    """The class, and the config classes of its package that its fields hold."""
    yield owner
    for info in owner.model_fields.values():
        for member in _members(info.annotation):
            if isinstance(member, type) and issubclass(member, Config) and _package(member) == _package(owner):
                yield from _config_classes(member)


def _members(annotation: Any) -> Iterator[Any]:
    parts = get_args(annotation)
    if not parts:
        yield annotation
    for part in parts:
        yield from _members(part)


def _package(owner: type) -> str:
    return owner.__module__.partition(".")[0]
