"""Pages that people wrote name files, functions and pages that are there."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest
import yaml
from nemorl.config.load import load_config
from nemorl.errors import NemorlError

ROOT = Path(__file__).parents[3]
GENERATED = ("docs/reference/", "docs/plugin-kinds/")
PAGES = [
    page
    for page in (*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md")
    if not page.relative_to(ROOT).as_posix().startswith(GENERATED)
]
CODE = (
    "core",
    "toolkits",
    "plugins",
    *(path.name for path in ROOT.glob("nemorl-*")),
    "tests",
    "benchmarks",
    "docs",
    "examples",
    "tools",
)
CONFIGURED = [*sorted((ROOT / "docs/backends").glob("*.md")), *sorted((ROOT / "docs/algorithms").glob("*.md"))]
"""Pages whose blocks of YAML are configs, or parts of one."""
ALGORITHMS = {"teacher": "distillation", "teachers": "distillation", "critic": "ppo"}
"""Algorithms that parts without one belong to, by their keys; others belong to ``grpo``."""
OTHERS = {
    "src/nemorl_near_miss/config.py",  # of the package that docs/first-plugin.md writes
    "src/nemorl_near_miss/environment.py",
}
_FENCE = re.compile(r"^( *)(```|~~~).*?^\1\2", re.MULTILINE | re.DOTALL)
_YAML = re.compile(r"^```yaml\n(?! )(.*?)^```", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_PLACE = re.compile(r"`((?:[\w.-]+/)+[\w.-]+\.py|\w+\.py::\w+|(?:[\w.-]+/)+[\w.-]+\.py::\w+)((?:::\w+)*)`")
_DOTTED = re.compile(r"`(nemorl(?:_\w+)?(?:\.\w+)+)`")
_TEST = re.compile(r"`(test_\w+)`")


@cache
def files() -> dict[str, Path]:
    """Every Python file by its path, and what ends it behind a slash."""
    found = (path for folder in CODE for path in (ROOT / folder).rglob("*.py") if "__pycache__" not in path.parts)
    return {path.relative_to(ROOT).as_posix(): path for path in found}


def at(place: str) -> list[Path]:
    return [path for name, path in files().items() if f"/{name}".endswith(f"/{place}")]


@cache
def names(path: Path) -> frozenset[str]:
    """What a file defines, at any depth, or binds at its top."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.alias):
            found.add(node.asname or node.name)
    return frozenset(found)


@cache
def known_tests() -> frozenset[str]:
    return frozenset(name for place, path in files().items() if place.startswith("tests/") for name in names(path))


def missing_places(text: str) -> list[str]:
    """What a text names as ``folder/file.py``, ``file.py::name`` or ``test_name``, and is not there."""
    found = []
    for place, more in _PLACE.findall(text):
        file, *symbols = f"{place}{more}".split("::")
        if place in OTHERS:
            continue
        defined = [names(path) for path in at(file)]
        if not any(set(symbols) <= known for known in defined):
            found.append("::".join([file, *symbols]))
    return found + [name for name in _TEST.findall(text) if name not in known_tests() and not at(f"{name}.py")]


def missing_modules(text: str) -> list[str]:
    """What a text names as ``nemorl_rl.module.name``, and is in no file."""
    return [dotted for dotted in _DOTTED.findall(text) if not _is_there(dotted.split("."))]


def _is_there(parts: list[str]) -> bool:
    for length in range(len(parts), 0, -1):
        place, rest = "/".join(parts[:length]), parts[length:]
        held = [*at(f"src/{place}.py"), *at(f"src/{place}/__init__.py")]
        if held:  # of a package, names come from elsewhere: its module is enough
            return not rest or any(rest[0] in names(path) for path in held) or length == 1
    return parts[0] == "nemorl" or not at(f"src/{parts[0]}/__init__.py")  # an entry-point group, an example's package


def dead_links(page: Path, text: str) -> list[str]:
    """Links to files beside a page that are not there."""
    links = (link for link in _LINK.findall(text) if "://" not in link and not link.startswith("mailto:"))
    places = (link.partition("#")[0] for link in links)
    return [place for place in places if place and not (page.parent / place).exists()]


def unknown_keys(text: str) -> list[str]:
    """Keys of its configs that no config has."""
    found = []
    for block in _YAML.findall(text):
        config = yaml.safe_load(block)
        algorithms = (name for key, name in ALGORITHMS.items() if key in config)
        whole = {"algorithm": next(algorithms, "grpo"), "model": "org/model", "data": "arithmetic", **config}
        try:
            load_config(whole)
        except NemorlError as error:
            found += [line.strip() for line in str(error).splitlines() if "unknown key" in line]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("page", CONFIGURED, ids=[page.stem for page in CONFIGURED])
def test_configs_of_a_page_have_keys_that_there_are(page: Path) -> None:
    assert not unknown_keys(page.read_text(encoding="utf-8"))


@pytest.mark.slow
def test_a_key_that_no_config_has_is_found() -> None:
    assert not unknown_keys("```yaml\ncritic: {model_name: org/judge}\n```\n")
    assert len(unknown_keys("```yaml\npolicy: {model: org/judge}\n```\n")) == 1


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=[page.relative_to(ROOT).as_posix() for page in PAGES])
def test_a_page_names_what_is_there(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    prose = _FENCE.sub("", text)
    assert not [*missing_places(prose), *missing_modules(prose), *dead_links(page, prose)]


@pytest.mark.slow
def test_what_is_gone_is_found() -> None:
    kept = "`nemorl_tensors/batch.py::loss_weights`, `nemorl_rl.policy_gradient`, `test_what_is_gone_is_found`"
    assert not [*missing_places(kept), *missing_modules(kept)]
    gone = "`tensors/batch.py`, `nemorl_tensors/batch.py::loss_wait`, `nemorl_rl.policy_gradient.advance`, `test_gone`"
    assert len([*missing_places(gone), *missing_modules(gone)]) == 4
    assert dead_links(ROOT / "docs/index.md", "[a](numerics.md#x) [b](numeric.md) [c](https://x.org/y)") == [
        "numeric.md"
    ]
