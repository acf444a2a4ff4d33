"""Writes ``docs/reference/api``: a page for each module of the stable surface, from signatures and docstrings.

    python docs/generate_api.py

The names are those of ``stable_surface.py``. Sources are read by griffe and not imported.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import griffe

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "docs"))

from stable_surface import SURFACE  # noqa: E402  (beside this program)

FOLDER = ROOT / "docs" / "reference" / "api"
CELL = 160
"""Longest signature of a table."""
INTRO = """\
# Public names

Generated from docstrings by `docs/generate_api.py`; do not edit. What is on these pages is stable: authors of plugins
may build on it, and a change of it is announced in the changelog. Other modules and names may change in any version.

Examples use names of these pages, and `torch`, without importing them. All but those that need a model, a cluster or a
service of others are run by a test.
"""


@cache
def sources() -> griffe.ModulesCollection:
    """The packages of this repository, parsed."""
    folders = [path for pattern in ("*", "toolkits/*", "plugins/*") for path in sorted(ROOT.glob(f"{pattern}/src"))]
    loader = griffe.GriffeLoader(search_paths=folders)
    for name in ("tensors", "rl", "trust", "cli", "testing", "tasks", "compat", "insight", "agents", "ops"):
        loader.load(f"nemorl_{name}")
    loader.load("nemorl")
    loader.resolve_aliases()
    return loader.modules_collection


@cache
def offered() -> Mapping[str, str]:
    """Where the names of ``import nemorl`` are: the kernel's own table, and the entry points ``nemorl.names``."""
    (table,) = [node for node in sources()["nemorl"].members.values() if node.name == "_KERNEL"]
    found = {name: f"{module}.{name}" for name, module in re.findall(r"'(\w+)': '([\w.]+)'", str(table.value))}
    for pattern in ("*", "toolkits/*", "plugins/*"):
        for path in ROOT.glob(f"{pattern}/pyproject.toml"):
            groups = tomllib.loads(path.read_text(encoding="utf-8"))["project"].get("entry-points", {})
            found |= {name: value.replace(":", ".") for name, value in groups.get("nemorl.names", {}).items()}
    return found


def documented(module: str, name: str) -> Any:
    """What griffe knows of a name of the surface, where it is defined."""
    found = sources()[offered()[name] if module == "nemorl" else f"{module}.{name}"]
    while found.is_alias or (found.is_attribute and str(found.value).isidentifier() and found.docstring is None):
        found = found.final_target if found.is_alias else found.parent.members[str(found.value)]
    return found


def docstring_of(module: str, name: str) -> str:
    """The docstring of a name of the surface; empty where there is none."""
    found = documented(module, name)
    return str(found.docstring.value) if found.docstring is not None else ""


def pages() -> dict[Path, str]:
    """Every page with its text."""
    found = {FOLDER / f"{module}.md": _page(module) for module in SURFACE}
    rows = [f"| [`{module}`]({module}.md) | {_summary(_about(module))} |" for module in SURFACE]
    return {FOLDER / "index.md": "\n".join([INTRO, "| module | holds |", "|---|---|", *rows]) + "\n", **found}


def _page(module: str) -> str:
    lines = [f"# `{module}`\n", _prose(_about(module)) + "\n"]
    for name in SURFACE[module]:
        home = home_of(module, name)
        if home is not None:
            lines.append(f"## `{name}`\n\n{_summary(docstring_of(module, name))} [More]({home}.md#{name.lower()})\n")
        else:
            lines += _entry(module, name)
    return "\n".join(lines).rstrip() + "\n"


def _about(module: str) -> str:
    return str(sources()[module].docstring.value)


def home_of(module: str, name: str) -> str | None:
    """The page of another module that a name belongs to, which ``import nemorl`` only offers."""
    if module != "nemorl":
        return None
    path = documented(module, name).canonical_path
    others = [other for other, names in SURFACE.items() if other != module and name in names]
    return next((other for other in others if documented(other, name).canonical_path == path), None)


def _entry(module: str, name: str) -> Iterator[str]:
    found = documented(module, name)
    yield f"## `{name}`\n"
    yield f"```python\n{signature(found, name)}\n```\n"
    yield _prose(found.docstring.value) + "\n"
    made = found.members.get("__init__") if found.is_class else None
    if made is not None and made.docstring is not None:
        yield _prose(made.docstring.value) + "\n"
    members = list(_members(found)) if found.is_class else []
    if members:
        yield "| member | |\n|---|---|"
        yield from members
        yield ""


def signature(found: Any, name: str) -> str:
    """As it is written in Python; of a class its bases, and on a line of its own how it is made."""
    if found.is_attribute:
        return f"{name} = {found.value}"
    if found.is_function:
        return f"def {name}{arguments(found.parameters)}{returned(found)}"
    bases = ", ".join(str(base) for base in found.bases)
    lines = [f"class {name}({bases})" if bases else f"class {name}"]
    made = found.members.get("__init__")
    if made is not None and not made.is_alias and "dataclass" not in found.labels:
        lines.append(f"{name}{arguments(made.parameters)}")
    return "\n".join(lines)


def arguments(parameters: griffe.Parameters) -> str:
    """In brackets, with annotations and defaults, without ``self``."""
    shown: list[str] = []
    starred = False
    for parameter in parameters:
        if parameter.name in ("self", "cls"):
            continue
        kind = parameter.kind
        if kind is griffe.ParameterKind.keyword_only and not starred:
            shown, starred = [*shown, "*"], True
        prefix = {griffe.ParameterKind.var_positional: "*", griffe.ParameterKind.var_keyword: "**"}.get(kind, "")
        starred = starred or prefix == "*"
        annotation = f": {parameter.annotation}" if parameter.annotation is not None else ""
        equals = " = " if annotation else "="
        default = f"{equals}{parameter.default}" if parameter.default is not None and not prefix else ""
        shown.append(f"{prefix}{parameter.name}{annotation}{default}")
    return f"({', '.join(shown)})"


def returned(found: Any) -> str:
    """The arrow and what follows it; empty where nothing is annotated."""
    return f" -> {found.returns}" if found.returns is not None else ""


def _members(found: Any) -> Iterator[str]:
    """Rows of a class's own public members that say what they are."""
    for name, member in found.members.items():
        if name.startswith("_") and not (name == "__call__" and member.docstring is not None):
            continue
        if member.is_alias or member.is_class:
            continue
        about = _summary(member.docstring.value) if member.docstring is not None else ""
        if member.is_function:
            yield f"| `{_cell(f'{name}{arguments(member.parameters)}{returned(member)}')}` | {about} |"
        else:
            annotation = f": {member.annotation}" if member.annotation is not None else ""
            default = f" = {member.value}" if member.value is not None and "property" not in member.labels else ""
            yield f"| `{_cell(f'{name}{annotation}{default}')}` | {about} |"


def _cell(text: str) -> str:
    text = " ".join(text.split())
    return (text if len(text) <= CELL else text[: CELL - 1] + "…").replace("|", "\\|")


def _summary(docstring: str) -> str:
    """The first paragraph on one line, fit for a table."""
    return " ".join(_words(docstring.partition("\n\n")[0]).split()).replace("|", "\\|")


def _words(text: str) -> str:
    """reStructuredText's literals and references as Markdown code."""
    return re.sub(r":\w+:`~?([^`]+)`", r"`\1`", text).replace("``", "`")


HEADINGS = ("Args", "Returns", "Raises", "Example")


def _prose(docstring: str) -> str:
    """A docstring as Markdown: its sections as lists, doctest lines as code."""
    done: list[str] = []
    for paragraph in docstring.strip().split("\n\n"):
        heading = paragraph.partition("\n")[0].removesuffix(":")
        if heading in HEADINGS:
            body = griffe.Docstring(paragraph.partition("\n")[2]).value
            done.append(f"{'Arguments' if heading == 'Args' else heading}:\n")
            done.append(_code(body) if ">>>" in body else _listed(body, heading))
        elif ">>>" in paragraph:
            done += ["Example:\n", _code(paragraph)]
        elif paragraph.startswith((" ", "#")) or re.search(r"^\w+ = ", paragraph):
            done.append(f"```text\n{paragraph}\n```\n")
        else:
            done.append(_words(paragraph) + "\n")
    return "\n".join(done).rstrip()


def _code(text: str) -> str:
    lines = [line.replace("  # doctest: +SKIP", "") for line in text.strip("\n").split("\n")]
    return "```pycon\n" + "\n".join(lines) + "\n```\n"


def _listed(body: str, heading: str) -> str:
    """``name: meaning`` of a section as a list; a plain text as it is."""
    items = re.split(r"\n(?=\S)", body)
    if heading == "Returns":
        return _words(body) + "\n"
    rows = [re.sub(r"^([\w*]+): ", r"`\1`: ", " ".join(_words(item).split())) for item in items]
    return "\n".join(f"- {row}" for row in rows) + "\n"


if __name__ == "__main__":
    from pages import update

    sys.exit(update(pages()))
