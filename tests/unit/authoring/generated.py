"""Packages as ``nemorl plugins new`` writes them, made known to this process without pip."""

from __future__ import annotations

import importlib
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nemorl.plugins import Index, Registry
from nemorl_testing.plugin import use_registry
from nemorl_testing.scaffold.names import Names
from nemorl_testing.scaffold.writing import write_package


def write(kind: str, name: str, parent: Path) -> tuple[Names, Path]:
    """The package of a kind under a name, in ``parent``."""
    names = Names.of(kind, name)
    return names, write_package(names, parent / names.distribution).folder


@contextmanager
def installed(*folders: Path) -> Iterator[Registry]:
    """These packages on the path, with the metadata that pip would write, for the length of the block."""
    sources = [str(_with_metadata(folder)) for folder in folders]
    before = set(sys.modules)
    sys.path[:0] = sources
    importlib.invalidate_caches()
    try:
        with use_registry(Registry(Index.installed())) as scoped:
            yield scoped
    finally:
        sys.path[:] = [path for path in sys.path if path not in sources]
        modules = tuple(f"{next(Path(source).glob('nemorl_*/__init__.py')).parent.name}" for source in sources)
        for module in set(sys.modules) - before:
            if module.partition(".")[0] in modules:
                del sys.modules[module]
        importlib.invalidate_caches()


def _with_metadata(folder: Path) -> Path:
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    source = folder / "src"
    info = source / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir(exist_ok=True)
    requires = "".join(f"Requires-Dist: {requirement}\n" for requirement in project["dependencies"])
    facts = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    (info / "METADATA").write_text(f"{facts}Summary: {project['description']}\n{requires}")
    lines = [
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in entries.items())
        for group, entries in project["entry-points"].items()
    ]
    (info / "entry_points.txt").write_text("\n".join(lines))
    return source
