"""Writes distributions to disk as pip would install them, for tests of discovery and diagnosis."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent

from nemorl.plugins.index import PREFIX

Install = Callable[..., None]
"""The fixture ``install``: :func:`write_distribution` into a folder of ``sys.path``."""

GOOD = """
    from nemorl.plugins.kinds import EnvironmentConfig

    class Env(EnvironmentConfig):
        "A plugin of the tests."
        summary = "made up"
        strict: bool = False
        "Whether to be strict."
"""
"""Source of a plugin that works."""


def write_distribution(
    folder: Path,
    distribution: str,
    entries: dict[str, str],
    *,
    module: str | None = None,
    code: str = GOOD,
    group: str = "environments",
    requires: tuple[str, ...] = (),
    version: str = "1.2",
) -> None:
    """One distribution of one module, with entry points of one group."""
    info = folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    lines = ["Metadata-Version: 2.1", f"Name: {distribution}", f"Version: {version}"]
    lines += [f"Requires-Dist: {requirement}" for requirement in requires]
    (info / "METADATA").write_text("\n".join(lines) + "\n")
    listed = "\n".join(f"{name} = {value}" for name, value in entries.items())
    (info / "entry_points.txt").write_text(f"[{PREFIX}{group}]\n{listed}\n")
    (folder / f"{module or distribution.replace('-', '_')}.py").write_text(dedent(code))
    importlib.invalidate_caches()
