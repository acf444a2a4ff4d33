"""Makes the modules of the table importable: a finder and loader for exactly those, and how they answer for names."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from nemorl.base.text.suggest import did_you_mean

from nemorl_compat.names import MODULES

ROOT = "nemo_rl"


class _TableLoader(Loader):
    """A module without a file: its names come from the table."""

    def create_module(self, spec: ModuleSpec) -> None:
        """An ordinary, empty module."""

    def exec_module(self, module: ModuleType) -> None:
        names = sorted(MODULES[module.__name__])
        module.__doc__ = f"{module.__name__}, served by nemorl."
        vars(module).update(__getattr__=reader(module.__name__), __all__=names, __dir__=lambda: names)


class _TableFinder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in MODULES or fullname == ROOT:
            return None
        has_children = any(name.startswith(f"{fullname}.") for name in MODULES)
        return ModuleSpec(fullname, _TableLoader(), origin="nemorl_compat.names", is_package=has_children)


def install() -> None:
    """Let this process import the modules of the table. Once is enough; again does nothing."""
    if not any(isinstance(finder, _TableFinder) for finder in sys.meta_path):
        sys.meta_path.append(_TableFinder())


def reader(module: str) -> Callable[[str], Any]:
    """``__getattr__`` of a module of the table: each use of a name warns, at the line that uses it.

    Python shows a warning once per line. The name is not kept in the module, so that every line is told.
    """

    def read(name: str) -> Any:
        new = MODULES[module].get(name)
        if new is None:
            if f"{module}.{name}" in MODULES:
                return importlib.import_module(f"{module}.{name}")
            hint = "" if name.startswith("_") else did_you_mean(name, MODULES[module]) or "See docs/migration.md."
            raise AttributeError(f"module {module!r} has no attribute {name!r}. {hint}".rstrip())
        shape = "" if new.is_same else "; it has another shape, see docs/migration.md"
        warnings.warn(f"{module}.{name} is deprecated: use {new.use}{shape}", DeprecationWarning, stacklevel=2)
        return locate(new.served)

    return read


def locate(dotted: str) -> Any:
    """The object of a dotted name, e.g. ``nemorl.config.Config``."""
    owner, _, name = dotted.rpartition(".")
    return getattr(importlib.import_module(owner), name)
