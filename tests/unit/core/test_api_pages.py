"""The stable surface: each name exists, is documented with an example that holds, and stands on its page."""

from __future__ import annotations

import doctest
import importlib
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import pytest
from nemorl.plugins import Index, Registry
from nemorl_testing.plugin import use_registry

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"


def program(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


sys.path.insert(0, str(DOCS))
API = program("generate_api")
sys.path.remove(str(DOCS))
SURFACE = API.SURFACE
NAMES = [(module, name) for module, names in SURFACE.items() for name in names]
WHOLE = (
    "nemorl.types",
    "nemorl.contracts",
    "nemorl.plugins.kinds",
    "nemorl.errors",
    "nemorl.contracts.environment",
    "nemorl.contracts.memory",
)
"""Modules all of whose public classes and functions are stable."""
LISTED = ("nemorl", "nemorl.config", "nemorl_tensors", "nemorl_testing")
"""Modules all of whose ``__all__`` is."""


def example_of(module: str, name: str) -> str:
    return "\n".join(re.findall(r"^\s*(?:>>>|\.\.\.).*$", API.docstring_of(module, name), re.MULTILINE))


@pytest.mark.slow
def test_every_name_of_the_surface_has_a_docstring_and_an_example() -> None:
    undocumented = [f"{module}.{name}" for module, name in NAMES if not API.docstring_of(module, name)]
    without_example = [f"{module}.{name}" for module, name in NAMES if ">>>" not in example_of(module, name)]
    assert (undocumented, without_example) == ([], [])
    assert len(NAMES) > 150


def test_a_docstring_begins_with_a_plain_sentence() -> None:
    riddles = [
        f"{module}.{name}"
        for module, name in NAMES
        for first in [API.docstring_of(module, name).partition("\n\n")[0]]
        if first.startswith(("What ", "Whether ", "Who ")) or not first.rstrip().endswith((".", ":"))
    ]
    assert not riddles


@pytest.mark.parametrize("module", SURFACE)
def test_every_name_of_the_surface_exists(module: str) -> None:
    there = importlib.import_module(module)
    assert [name for name in SURFACE[module] if not hasattr(there, name)] == []


@pytest.mark.parametrize("module", LISTED)
def test_the_surface_has_all_that_a_module_offers(module: str) -> None:
    assert set(SURFACE[module]) == set(importlib.import_module(module).__all__) - {"__version__"}


@pytest.mark.parametrize("module", WHOLE)
def test_the_surface_leaves_out_no_public_class_or_function(module: str) -> None:
    there = importlib.import_module(module)
    public = {
        name
        for name, value in vars(there).items()
        if not name.startswith("_") and callable(value) and getattr(value, "__module__", "") == module
    }
    assert public - set(SURFACE[module]) == set()


def test_every_page_is_made_and_in_the_navigation() -> None:
    fields = program("generate_reference")
    wanted = {**API.pages(), fields.PAGE: fields.page()}
    assert [page.name for page, text in wanted.items() if not text.startswith("# ")] == []
    navigation = set(re.findall(r" (reference/\S+\.md)\n", (ROOT / "mkdocs.yml").read_text(encoding="utf-8")))
    assert navigation == {page.relative_to(DOCS).as_posix() for page in wanted}


def test_few_examples_are_left_out() -> None:
    lines = [line for module, name in NAMES for line in example_of(module, name).splitlines() if ">>>" in line]
    left_out = [line for line in lines if "+SKIP" in line]
    assert len(left_out) < len(lines) / 6


class Examples(doctest.DocTestRunner):
    """Collects what an example prints that it should not."""

    def __init__(self) -> None:
        super().__init__(optionflags=doctest.ELLIPSIS)
        self.seen: list[str] = []

    def run_all(self, module: str) -> list[str]:
        names = known_names(module)
        for name in SURFACE[module]:
            text = API.docstring_of(module, name)
            test = doctest.DocTestParser().get_doctest(text, dict(names), f"{module}.{name}", None, 0)
            self.run(test, out=self.seen.append)
        return self.seen


def known_names(module: str) -> dict[str, Any]:
    """What examples use without importing it: names of the surface, first of all those of their own module."""
    import nemorl
    import torch
    from nemorl.weights import transport
    from nemorl_rl.data.rows import RowDataModule
    from nemorl_rl.data.validation_sets import HeldOutRows

    names: dict[str, Any] = {"Annotated": Annotated, "Path": Path, "torch": torch, "nemorl": nemorl}
    names |= {"RowDataModule": RowDataModule, "HeldOutRows": HeldOutRows, "transport": transport, "Printed": object}
    for other in SURFACE:
        there = importlib.import_module(other)
        names |= {name: getattr(there, name) for name in SURFACE[other]}
    return {**names, **vars(importlib.import_module(module))}


@pytest.mark.parametrize("module", SURFACE)
def test_the_examples_hold(module: str) -> None:
    with use_registry(Registry(Index.installed())):
        seen = Examples().run_all(module)
    assert not seen, "".join(seen)


def test_a_wrong_example_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(API, "docstring_of", lambda module, name: ">>> 1 + 1\n3\n")
    assert len(Examples().run_all("nemorl.trainer")) == 1


def test_a_schema_describes_without_examples() -> None:
    from nemorl.config import CheckpointConfig

    assert CheckpointConfig.model_json_schema()["description"] == "When to save, and what to keep."
