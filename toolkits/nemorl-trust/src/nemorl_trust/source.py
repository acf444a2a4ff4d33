"""A plugin's source, read without running it: that it is there, that it parses, its one-line summary. And whether the
plugin works, as far as importing its config module tells.

``plugins list`` shows plugins that nobody has asked for yet, so none of their code may run: modules are located the way
import would, but not even their parent packages are imported, and the file is parsed, not executed.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.machinery import ModuleSpec, PathFinder
from itertools import accumulate
from pathlib import Path

from nemorl.base.packages.owner import described
from nemorl.errors import PluginError
from nemorl.plugins.index import Diagnostic, PluginEntry, singular
from nemorl.plugins.registry import RegisteredPoint, Registry

DYNAMIC = "__getattr__"
"""A module that defines it may offer any name."""


@dataclass(frozen=True)
class SourceFacts:
    """Facts about a plugin from its files."""

    summary: str = ""
    problem: Diagnostic | None = None
    """Set where loading the plugin can only fail."""


def read_source(entry: PluginEntry) -> SourceFacts:
    """Summary and certain failures of one entry. Imports nothing."""
    if entry.status == "unreadable":
        return SourceFacts()
    if isinstance(entry.point, RegisteredPoint):  # of this program: perhaps no file could say where it is
        return SourceFacts((inspect.getdoc(entry.point.load()) or "").partition("\n")[0])
    fallback = _distribution_summary(entry)
    try:
        if entry.kind == "templates":
            return SourceFacts(_leading_comment(template_text(entry)) or fallback)
        tree = _parsed(entry)
    except PluginError as error:
        problem = Diagnostic("broken", "NRL106", entry.id, error.message, error.fix or "")
        return SourceFacts(fallback, problem)
    attribute = entry.point.attr.partition(".")[0]
    if tree is None or not attribute:
        return SourceFacts(fallback)
    names = dict(_bound_names(tree.body))
    if attribute not in names and not names.keys() & {"*", DYNAMIC}:
        message = f"{entry.point.module} defines no {attribute!r}, which its entry point names"
        return SourceFacts(fallback, Diagnostic("broken", "NRL106", entry.id, message, _reinstall(entry)))
    own = _of_command(tree, attribute, names.get(attribute)) if entry.kind == "commands" else ""
    return SourceFacts(own or _summary(names.get(attribute)) or fallback)


def diagnose(entry: PluginEntry, plugins: Registry) -> Diagnostic | None:
    """The reason why an entry of ``plugins`` cannot be used; ``None`` where it can."""
    if entry.diagnostics:
        return entry.diagnostics[0]
    if entry.kind == "templates":  # files, which nobody imports
        return read_source(entry).problem
    try:
        loaded = Registry(plugins.index).load(entry.kind, entry.id)  # anew: what failed may work by now
    except PluginError as error:
        return Diagnostic("broken", "NRL106", entry.id, error.message, error.fix or "", repr(error.__cause__))
    from nemorl.plugins.kinds import PluginConfig  # pydantic takes 0.1 s, which `plugins list` need not wait for

    missing = loaded.missing_modules() if isinstance(loaded, type) and issubclass(loaded, PluginConfig) else []
    if not missing:
        return None
    fix = loaded.install_hint or f"pip install {' '.join(missing)}"
    return Diagnostic("missing", "NRL105", entry.id, f"needs {', '.join(missing)}, which cannot be found", fix)


def template_text(entry: PluginEntry) -> str:
    """The config file that an entry of ``nemorl.templates`` names as ``package.folder:file.yaml``.

    Raises:
        PluginError: there is no such file.
    """
    package, name = entry.point.module, entry.point.attr
    for folder in locate(package, entry.search_path).folders if name else ():
        path = folder / name
        if path.is_file():
            return _text(path, entry)
    raise PluginError(f"package {package} of {entry.distribution} holds no file {name!r}", fix=_reinstall(entry))


def _text(path: Path, entry: PluginEntry) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PluginError(f"{path} is no UTF-8 text that can be read: {error}", fix=_reinstall(entry)) from error


@dataclass(frozen=True)
class Place:
    """Where a module is. Neither file nor folders: nowhere."""

    file: Path | None = None
    """Its file, or a package's ``__init__.py``; a namespace package has none."""
    folders: tuple[Path, ...] = ()
    """Of a package: where its modules are."""


def locate(module: str, path: Sequence[str] | None = None) -> Place:
    """Where import would find a module, in ``path`` or (unset) in this process. Imports no parent package."""
    place = Place()
    for name in accumulate(module.split("."), "{}.{}".format):
        place = _locate_in(name, path)
        path = [str(folder) for folder in place.folders]
    return place


def _locate_in(name: str, path: Sequence[str] | None) -> Place:
    try:
        spec = PathFinder.find_spec(name, path) if path is not None else _find_anywhere(name)
    except KeyError:  # a namespace package in a package asks for its parent, which nobody has imported
        folders = (Path(entry) / name.rpartition(".")[2] for entry in path or ())
        return Place(None, tuple(folder for folder in folders if folder.is_dir()))
    if spec is None:
        return Place()
    return Place(Path(spec.origin) if spec.origin else None, tuple(map(Path, spec.submodule_search_locations or ())))


def _find_anywhere(name: str) -> ModuleSpec | None:
    # Editable installs may have a finder of their own.
    found = (finder.find_spec(name, None) for finder in sys.meta_path)
    return next((spec for spec in found if spec is not None), None)


def _parsed(entry: PluginEntry) -> ast.Module | None:
    """The syntax tree of the entry's module; ``None`` where it is no Python source."""
    module = entry.point.module
    place = locate(module, entry.search_path)
    if place.file is None and not place.folders:
        raise PluginError(f"there is no module {module}, which its entry point names", fix=_reinstall(entry))
    if place.file is None or place.file.suffix != ".py":
        return None
    try:
        return _tree(place.file, place.file.stat().st_mtime_ns)
    except OSError as error:
        raise PluginError(f"{place.file} cannot be read: {error.strerror}", fix=_reinstall(entry)) from error
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:  # the last two: nested too deeply
        where = f"line {error.lineno}: {error.msg}" if isinstance(error, SyntaxError) else repr(error)
        message = f"{singular(entry.kind)} {entry.name!r}: {entry.point.module} is not valid Python ({where})"
        raise PluginError(message, fix=_reinstall(entry)) from error


@cache
def _tree(file: Path, _modified_ns: int) -> ast.Module:
    """A parsed file: a package often offers several parts from one."""
    return ast.parse(file.read_bytes())


def _bound_names(body: Sequence[ast.stmt]) -> Iterator[tuple[str, ast.stmt]]:
    """Names that a module's top level binds, also inside ``if`` and ``try``, with the statement that does."""
    for node in body:
        match node:
            case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                yield node.name, node
            case ast.Import() | ast.ImportFrom():
                yield from ((alias.asname or alias.name.partition(".")[0], node) for alias in node.names)
            case ast.Assign():
                found = (name for target in node.targets for name in ast.walk(target))
                yield from ((name.id, node) for name in found if isinstance(name, ast.Name))
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield name, node
            case ast.If() | ast.Try() | ast.With() | ast.For() | ast.While():
                for block in ("body", "orelse", "finalbody"):
                    yield from _bound_names(getattr(node, block, []))
                for handler in getattr(node, "handlers", []):
                    yield from _bound_names(handler.body)


def _summary(node: ast.stmt | None) -> str:
    """``summary = "…"`` of a class, else the first line of the docstring."""
    if not isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        return ""
    for statement in node.body:
        match statement:
            case ast.AnnAssign(target=ast.Name(id="summary"), value=ast.Constant(value=str(text))):
                return text
            case ast.Assign(targets=[ast.Name(id="summary")], value=ast.Constant(value=str(text))):
                return text
    return (ast.get_docstring(node) or "").partition("\n")[0]


def _of_command(tree: ast.Module, name: str, node: ast.stmt | None) -> str:
    """The ``help`` that an app of typer is made with, else of its callback's docstring or its one command's."""
    match node:
        case ast.Assign(value=ast.Call(keywords=keywords)):
            given = [word.value for word in keywords if word.arg == "help"]
        case _:
            given = []
    texts = [value.value for value in given if isinstance(value, ast.Constant) and isinstance(value.value, str)]
    for kind in ("callback", "command"):
        functions = [one for one in tree.body if isinstance(one, ast.FunctionDef) and _is_of_app(one, name, kind)]
        texts += [ast.get_docstring(function) or "" for function in functions if len(functions) == 1]
    first = next(filter(None, texts), "").partition("\n\n")[0]
    return " ".join(first.split())


def _is_of_app(function: ast.FunctionDef, app: str, kind: str) -> bool:
    """Whether ``@app.command(…)`` stands above it."""
    called = [one.func for one in function.decorator_list if isinstance(one, ast.Call)]
    of_app = [one for one in called if isinstance(one, ast.Attribute) and isinstance(one.value, ast.Name)]
    return any(one.attr == kind and one.value.id == app for one in of_app)  # type: ignore[attr-defined]


def _leading_comment(text: str) -> str:
    first = text.lstrip().partition("\n")[0]
    return first.lstrip("# ").strip() if first.startswith("#") else ""


def _distribution_summary(entry: PluginEntry) -> str:
    return described(entry.point.dist).summary if entry.point.dist is not None else ""


def _reinstall(entry: PluginEntry) -> str:
    return f"reinstall or update {entry.distribution}, or tell its authors"
