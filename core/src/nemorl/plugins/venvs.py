"""Virtual environments of isolated plugins: where they are, and what each offers. Read from metadata, imported never.

``nemorl plugins install NAME --isolated`` makes one folder per plugin, with an interpreter of its own. Its record
(``nemorl-plugin.json``) is written last, so a folder without one is half made and is ignored.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from nemorl.plugins.policy import normalize

HOME = "NEMORL_HOME"
"""Environment variable: the folder that holds isolated plugins. Unset: the user's data folder."""
RECORD = "nemorl-plugin.json"


@dataclass(frozen=True)
class PluginVenv:
    """The virtual environment of one distribution."""

    folder: Path
    distribution: str

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def site_packages(self) -> Path:
        return next(self.folder.glob("lib/python*/site-packages"), self.folder / "lib")

    @property
    def points(self) -> Iterator[IsolatedPoint]:
        """The entry points of its distribution; what else is installed there is not offered."""
        for dist in metadata.distributions(name=self.distribution, path=[str(self.site_packages)]):
            for point in dist.entry_points:
                yield IsolatedPoint(point, dist, self)
            return


class IsolatedPoint(metadata.EntryPoint):
    """An entry point of another virtual environment. Loading it gives a stand-in: see ``nemorl.plugins.isolated``."""

    def __init__(self, point: metadata.EntryPoint, dist: metadata.Distribution, venv: PluginVenv) -> None:
        super().__init__(point.name, point.value, point.group)
        vars(self).update(dist=dist, venv=venv)  # entry points refuse assignment

    @property
    def home(self) -> PluginVenv:
        found: PluginVenv = vars(self)["venv"]
        return found

    def load(self) -> Any:
        from nemorl.plugins.isolated import stand_in

        return stand_in(self.home, self.group.removeprefix("nemorl."), self.value)


def venvs_folder() -> Path:
    """Where isolated plugins live."""
    if home := os.environ.get(HOME):
        return Path(home).expanduser() / "plugins"
    from platformdirs import user_data_path

    return user_data_path("nemorl") / "plugins"


def venv_of(distribution: str) -> PluginVenv:
    """The environment that a distribution has, or would have."""
    return PluginVenv(venvs_folder() / normalize(distribution), normalize(distribution))


def plugin_venvs() -> Iterator[PluginVenv]:
    """Every environment that is complete, by name."""
    folder = venvs_folder()
    for record in sorted(folder.glob(f"*/{RECORD}")) if folder.is_dir() else ():
        try:
            distribution = json.loads(record.read_text(encoding="utf-8"))["distribution"]
        except (OSError, ValueError, KeyError, TypeError):
            continue
        yield PluginVenv(record.parent, str(distribution))
