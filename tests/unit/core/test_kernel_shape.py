"""The kernel stays small and has no circles of import."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from nemorl.base.packages.plugin_policy import HOUSE

KERNEL = Path(__file__).parents[3] / "core/src/nemorl"
MAX_LINES = 12_840
"""Of all sources, without the examples in docstrings. DESIGN wants 10,000: it goes down, and up for a contract alone
(media, versions of tokens, formats of answers and feedback, routes: 171; engines over several nodes: 24; receipts of
weights: 74; values by reference: 130; ranks that hang, collectives that fail, nodes that drain: 756; engines that come
and go: 77; devices of training that are lent: 40; the line of a foreign error: 33). What two
plugins need belongs into a toolkit."""
MAX_ROOT_MODULES = 12
FACADE = "nemorl"
"""Runs before all others, and finds what it offers by name, on first use: nobody waits for it."""
MAX_TYPE_CIRCLE = 7
"""Files that name each other in annotations, at most."""


def modules() -> dict[str, Path]:
    found = {}
    for path in sorted(KERNEL.rglob("*.py")):
        parts = ("nemorl", *path.relative_to(KERNEL).with_suffix("").parts)
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imported(node: ast.AST, *, types_too: bool) -> Iterator[str]:
    """Modules of the kernel, and names in them, that a file imports, also inside functions."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test) and not types_too:
            for other in child.orelse:
                yield from imported(other, types_too=types_too)
            continue
        if isinstance(child, ast.ImportFrom):
            yield child.module or ""
            yield from (f"{child.module}.{alias.name}" for alias in child.names)
        elif isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        yield from imported(child, types_too=types_too)


def circles(*, types_too: bool) -> list[list[str]]:
    """The sets of modules that reach each other (Tarjan's strongly connected components), the largest first."""
    known = modules()
    arrows: dict[str, set[str]] = {}
    for name, path in known.items():
        targets = set(imported(ast.parse(path.read_text()), types_too=types_too)) & set(known)
        arrows[name] = targets - {name, FACADE}
    number: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        number[name] = lowest[name] = len(number)
        stack.append(name)
        for target in sorted(arrows[name]):
            if target not in number:
                visit(target)
                lowest[name] = min(lowest[name], lowest[target])
            elif target in stack:
                lowest[name] = min(lowest[name], number[target])
        if lowest[name] == number[name]:
            component = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            if len(component) > 1:
                found.append(component)

    for name in known:
        if name not in number:
            visit(name)
    return sorted(found, key=len, reverse=True)


def lines_of(source: str) -> int:
    """Lines of a file, less those from the first ``>>>`` of a docstring to its end."""
    texts = [node.value.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Expr) if is_text(node)]  # type: ignore[attr-defined]
    return len(source.splitlines()) - sum(1 + text[text.index(">>>") :].count("\n") for text in texts if ">>>" in text)


def is_text(node: ast.Expr) -> bool:
    return isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def test_an_example_is_not_counted() -> None:
    assert lines_of('def f():\n    """One.\n\n    >>> f()\n    1\n    """\n    return 1\n') == 7 - 3


def test_the_kernel_is_small() -> None:
    assert sum(lines_of(path.read_text()) for path in modules().values()) <= MAX_LINES


def test_few_modules_are_at_the_root() -> None:
    at_root = [path.stem for path in KERNEL.glob("*.py") if not path.stem.startswith("__")]
    assert len(at_root) <= MAX_ROOT_MODULES, at_root


def test_nothing_that_runs_imports_in_a_circle() -> None:
    assert circles(types_too=False) == []


def test_circles_of_annotations_are_small() -> None:
    assert [circle for circle in circles(types_too=True) if len(circle) > MAX_TYPE_CIRCLE] == []


def test_the_house_that_every_policy_admits_is_the_kernel_and_the_toolkits() -> None:
    toolkits = {folder.name for folder in (KERNEL.parents[2] / "toolkits").iterdir() if folder.is_dir()}
    assert {"nemorl-core", *toolkits} == HOUSE
