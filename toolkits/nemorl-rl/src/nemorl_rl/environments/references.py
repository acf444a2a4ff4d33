"""Functions named in a config: ``"file.py:function"`` or ``"package.module:function"``."""

from __future__ import annotations

import ast
import importlib
import re
import sys
from collections.abc import Callable, Iterator
from hashlib import sha256
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from nemorl.base.text.reading import shown
from nemorl.base.text.suggest import did_you_mean
from nemorl.errors import ConfigIssue, UsageError, boundary

FORM = r"^[^:]+:[A-Za-z_]\w*$"


def is_reference(text: object) -> bool:
    """It names a function of a file, not a plugin.

    >>> is_reference("rewards.py:correct"), is_reference("nemorl-math-env:math")
    (True, False)
    """
    return isinstance(text, str) and text.partition(":")[0].endswith(".py")


def load_function(reference: str) -> Callable[..., Any]:
    """The function that a reference names. A file is run once, whatever names it.

    Raises:
        UsageError: There is no such function.
        ForeignError: The file raised an error of its own.
    """
    place, _, name = reference.rpartition(":")
    with boundary(place):
        module = _file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    function: Callable[..., Any] | None = getattr(module, name, None)
    if not callable(function):
        names = [one for one, value in vars(module).items() if callable(value)]
        raise UsageError(f"{place} has no function {name!r}", fix=did_you_mean(name, names) or f"define {name} there")
    return function


def reference_problems(path: str, reference: str) -> Iterator[ConfigIssue]:
    """Problems of a reference's form and, where it names a file, of that, found without running it."""
    if not re.match(FORM, reference):
        file = reference.partition(":")[0]
        fix = f"write {file}:FUNCTION" if file.endswith(".py") else "write FILE.py:FUNCTION or PACKAGE.MODULE:FUNCTION"
        yield ConfigIssue(path, f"{shown(reference)} names no function", fix)
        return
    place, _, name = reference.rpartition(":")
    if not place.endswith(".py"):
        return
    try:
        source = Path(place).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = "it does not exist" if isinstance(error, FileNotFoundError) else str(error)
        yield ConfigIssue(path, f"{place} cannot be read: {reason}", "correct the path, FILE.py:FUNCTION", here=True)
        return
    try:
        tree = ast.parse(source)
    except SyntaxError as error:
        yield ConfigIssue(path, f"{place}, line {error.lineno}: {error.msg}", "mend the file", here=True)
        return
    names = _names(tree)
    if name not in names and "*" not in names:
        fix = did_you_mean(name, names) or f"define {name} there"
        yield ConfigIssue(path, f"{place} has no function {name!r}", fix, here=True)


def _names(tree: ast.Module) -> list[str]:
    """Names that a file defines or imports, at any depth: what stands in an ``if`` or a ``try`` counts."""
    found: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.append(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found += [alias.asname or alias.name for alias in node.names]
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.append(node.id)
    return found


def _file(path: Path) -> ModuleType:
    path = path.resolve()
    name = f"nemorl_file_{sha256(str(path).encode()).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise UsageError(f"{path} is no Python file", fix="correct the path, FILE.py:FUNCTION")
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # files beside it can be imported
    module = module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
