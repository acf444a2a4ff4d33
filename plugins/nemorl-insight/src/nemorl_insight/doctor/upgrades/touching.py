"""Plugins that use a package, by what they require and import. Sources are parsed, none is run."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from nemorl.plugins import PluginEntry, registry
from nemorl.plugins.registry import BASES
from packaging.utils import canonicalize_name

from nemorl_insight.doctor.installed import Installed, Package

BACKENDS = frozenset({"training_backends", "generation_backends"})
"""Kinds that run the toolkits' models, whichever of the two imports a library."""


def modules_of(package: Package) -> list[str]:
    """The modules that a distribution brings, at the top: ``["megatron.core"]`` of a namespace, else ``["torch"]``."""
    files = [Path(str(file)) for file in package.distribution.files or ()]
    sources = [file for file in files if file.suffix in (".py", ".so", ".pyd") and ".." not in file.parts]
    packages = {file.parts[:-1] for file in sources if file.name == "__init__.py"}
    found = {parts for parts in packages if not any(parts[:n] in packages for n in range(1, len(parts)))}
    alone = {file.name.partition(".")[0] for file in sources if len(file.parts) == 1}
    names = {".".join(parts) for parts in found} | alone
    return sorted(name for name in names if all(part.isidentifier() for part in name.split(".")))


def touched(package: Package, modules: Sequence[str], installed: Installed) -> dict[str, list[PluginEntry]]:
    """Plugins that use a package, by why.

    A plugin does if a module of its distribution that its own module leads to imports it. A backend also does if its
    distribution requires one of nemorl's that imports or requires the package. Where none does, all backends of
    distributions that need it at any remove do.

    Args:
        package: The changed distribution.
        modules: What it brings.
        installed: All that is.
    """
    entries = [entry for entry in registry().index.entries if entry.kind in BASES and not entry.diagnostics]
    direct = [entry for entry in entries if entry.venv is None and _imports(entry, modules)]
    users = {p.key for p in installed if p.is_plugin and package.key in _required(p)}
    users |= {canonicalize_name(entry.distribution) for entry in direct}
    through = [e for e in entries if e.kind in BACKENDS and e not in direct and _needs(e, users, installed)]
    return {why: found for why, found in (("imports it", direct), ("through what it requires", through)) if found}


def _needs(entry: PluginEntry, users: set[str], installed: Installed) -> bool:
    """The distribution of a plugin is, or requires at any remove, one of ``users``."""
    seen: set[str] = set()
    left: list[str] = [canonicalize_name(entry.distribution)]
    while left:
        name = left.pop()
        if name in users:
            return True
        package = installed.get(name)
        if name in seen or package is None or not package.is_plugin:
            continue
        seen.add(name)
        left += _required(package)
    return False


def _required(package: Package) -> set[str]:
    """Names that a distribution requires, its extras too."""
    return {canonicalize_name(requirement.name) for requirement in package.requirements}


def _imports(entry: PluginEntry, modules: Sequence[str]) -> bool:
    """A module that the plugin's module leads to, within the same top-level package, imports one of ``modules``."""
    first = entry.value.partition(":")[0]
    own, seen, left = first.partition(".")[0], set[str](), [first]
    while left:
        name = left.pop()
        if name in seen:
            continue
        seen.add(name)
        for found in imports_of(name):
            if any(found == module or found.startswith(f"{module}.") for module in modules):
                return True
            if found.partition(".")[0] == own:
                left.append(found)
    return False


@cache
def imports_of(module: str) -> frozenset[str]:
    """Absolute names that a module imports anywhere in it; of ``from a import b``, both ``a`` and ``a.b``."""
    source = _source(module)
    if source is None:
        return frozenset()
    try:
        tree = ast.parse(source.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return frozenset()
    package = module if source.name == "__init__.py" else module.rpartition(".")[0]
    return frozenset(_names(tree, package))


def _names(tree: ast.AST, package: str) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(target, ast.Name) and target.id == "requires_modules" for target in targets):
                yield from filter(None, map(_text, ast.walk(node.value)))
        elif (text := _text(node)).startswith(package.partition(".")[0] + "."):
            yield text.partition(":")[0]  # a module that is imported by name later


def _text(node: ast.AST) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def _source(module: str) -> Path | None:
    """The file of a module of ours, found without importing its package's parents beyond the top."""
    top, *rest = module.split(".")
    try:
        spec = find_spec(top)
    except (ImportError, ValueError):
        return None
    for place in (spec.submodule_search_locations or ()) if spec is not None else ():
        path = Path(place, *rest)
        for file in (path / "__init__.py", path.with_suffix(".py")):
            if file.is_file():
                return file
    return Path(spec.origin) if spec is not None and not rest and spec.origin and spec.origin.endswith(".py") else None


def by_kind(found: Mapping[str, Sequence[PluginEntry]]) -> list[PluginEntry]:
    """All of them, each once, the quickest kinds first."""
    every = {(entry.kind, entry.id): entry for entries in found.values() for entry in entries}
    return sorted(every.values(), key=lambda entry: (entry.kind in BACKENDS, entry.kind, entry.name))
