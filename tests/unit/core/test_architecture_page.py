"""docs/architecture.md names files, folders and names that exist, and leaves out no room of the kernel; the examples of
the toolkits' READMEs run."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
KERNEL = ROOT / "core/src/nemorl"
PATH = re.compile(r"[\w.-]+(?:/[\w.-]+)*/?")


def sections() -> Iterator[tuple[str, str, Path]]:
    """(heading, text, folder that its paths are in) of each section; the repository, where it names no folder."""
    for section in TEXT.split("\n## ")[1:]:
        said = re.search(r"Paths are in `([^`]+)`|, in `([^`]+)`:", section)
        yield section.partition("\n")[0], section, ROOT / (next(filter(None, said.groups())) if said else "")


def paths_in(text: str) -> list[str]:
    """What stands in code marks and looks like a path: it has a slash, or a suffix of a source file."""
    spans = [span for span in re.findall(r"`([^`\n]+)`", text) if PATH.fullmatch(span)]
    return [span for span in spans if "/" in span or span.endswith((".py", ".toml", ".md"))]


def test_every_path_on_the_page_exists() -> None:
    missing = [
        f"{heading}: {path}"
        for heading, text, folder in sections()
        for path in paths_in(text)
        if not ((folder / path).exists() or (ROOT / path).exists())
        and not path.endswith((".html", ".jsonl"))  # of a run
    ]
    assert sum(len(paths_in(text)) for _, text, _ in sections()) > 80
    assert not missing


def test_the_kernels_rooms_are_all_on_the_page() -> None:
    (kernel,) = [text for heading, text, _ in sections() if heading == "The kernel"]
    rooms = {path.name for path in KERNEL.glob("*.py") if not path.name.startswith("__")}
    rooms |= {f"{path.parent.name}/" for path in KERNEL.glob("*/__init__.py")}
    assert rooms == set(re.findall(r"^\| `([\w./]+)` \|", kernel, re.MULTILINE))


def test_the_toolkits_are_all_on_the_page() -> None:
    (toolkits,) = [text for heading, text, _ in sections() if heading == "The toolkits"]
    packages = {path.parent.name for path in ROOT.glob("toolkits/*/src/*/__init__.py")}
    assert packages == set(re.findall(r"^\| `(\w+)` \|", toolkits, re.MULTILINE))


PLACES = re.findall(r"^\| ([^|]+) \| [^|`]*`([^`|]+)`[^|]* \| `(\w+)` \|$", TEXT, re.MULTILINE)


@pytest.mark.parametrize(("change", "place", "name"), PLACES, ids=[change for change, _, _ in PLACES])
def test_what_a_change_begins_at_is_in_its_place(change: str, place: str, name: str) -> None:
    path = ROOT / place
    files = [path] if path.is_file() else sorted(path.glob("*.py"))
    definition = re.compile(rf"^(?:class |(?:async )?def )?{name}\b(?!\.)", re.MULTILINE)
    assert any(definition.search(file.read_text(encoding="utf-8")) for file in files), f"{change}: no {name} in {place}"


def test_the_table_of_places_is_read() -> None:
    assert len(PLACES) >= 20


@pytest.mark.parametrize("readme", sorted(ROOT.glob("toolkits/*/README.md")), ids=lambda path: path.parent.name)
def test_the_example_of_a_toolkit_runs(readme: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"^```python\n(.*?)^```", readme.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    exec(compile(code, str(readme), "exec"), {"__name__": "readme"})


@pytest.mark.parametrize("readme", sorted(ROOT.glob("toolkits/*/README.md")), ids=lambda path: path.parent.name)
def test_what_a_toolkits_readme_imports_exists(readme: Path) -> None:
    rows = re.findall(r"^\| `from ([\w.]+) import ([\w, ]+)` \|", readme.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(rows) >= 3
    for module, names in rows:
        assert all(hasattr(importlib.import_module(module), name) for name in names.split(", ")), (module, names)
