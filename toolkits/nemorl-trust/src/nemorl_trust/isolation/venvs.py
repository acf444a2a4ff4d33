"""Virtual environments of isolated plugins: where they are, and what each offers. Read from metadata, imported never.

``nemorl plugins install NAME --isolated`` makes one folder per plugin, with an interpreter of its own. Its record
(``nemorl-plugin.json``) is written first and completed last: a folder whose record is incomplete is half made and is
ignored, and one without a record is not nemorl's and is never removed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, cast

from nemorl.base.files.atomic import replace_text
from nemorl.base.packages.distributions import guarded, points_of
from nemorl.base.packages.owner import DAMAGED, DamagedPoint
from nemorl.base.packages.plugin_policy import normalize
from nemorl.errors import PluginError, UsageError
from nemorl.plugins.index import ForeignPoint

HOME = "NEMORL_HOME"
"""Environment variable: the folder that holds isolated plugins. Unset: the user's data folder."""
RECORD = "nemorl-plugin.json"
_DISTRIBUTION = re.compile(r"[A-Z0-9]|[A-Z0-9][A-Z0-9._-]*[A-Z0-9]", re.IGNORECASE | re.ASCII)
"""A name by PEP 508: no path, no option, nothing empty."""


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
    def variables(self) -> tuple[str, ...]:
        """Environment variables that were granted to it when it was installed."""
        granted = (_read_record(self.folder) or {}).get("environment")
        return tuple(map(str, granted)) if isinstance(granted, list) else ()

    def points(self, prefix: str) -> Iterator[metadata.EntryPoint]:
        """The entry points of its distribution whose groups start with ``prefix``, of no other that is installed."""
        for dist in map(guarded, metadata.distributions(name=self.distribution, path=[str(self.site_packages)])):
            offered, damage = points_of(dist, prefix)
            yield from (IsolatedPoint(point, dist, self) for point in offered)
            if damage is not None:
                yield DamagedPoint(prefix + DAMAGED, dist, damage)
            return


class IsolatedPoint(ForeignPoint):
    """An entry point of another virtual environment. Loading it gives a stand-in (``stand_ins``)."""

    def load(self) -> Any:
        from nemorl_trust.isolation.stand_ins import stand_in

        return stand_in(cast("PluginVenv", self.home), self.group.removeprefix("nemorl."), self.value)


def venvs_folder() -> Path:
    """Where isolated plugins live."""
    if home := os.environ.get(HOME):
        return Path(os.path.expanduser(home)) / "plugins"  # which never raises
    from platformdirs import user_data_path

    return user_data_path("nemorl") / "plugins"


def distribution_name(text: str) -> str:
    """The normalised form of a distribution's name.

    Raises:
        UsageError: it is no name by PEP 508, for example a path.
    """
    if not isinstance(text, str) or not _DISTRIBUTION.fullmatch(text):
        raise UsageError(
            f"{text!r} is no package: no distribution can have this name",
            fix="give a name of letters, digits, '.', '-' and '_', as `nemorl plugins list` shows it",
        )
    return normalize(text)


def venv_of(distribution: str) -> PluginVenv:
    """The environment that a distribution has, or would have."""
    name = distribution_name(distribution)
    return PluginVenv(venvs_folder() / name, name)


def plugin_venvs() -> Iterator[PluginVenv]:
    """Every environment that is complete, by name."""
    try:
        records = sorted(venvs_folder().glob(f"*/{RECORD}"))
    except OSError:  # a folder of somebody else's
        return
    for record in records:
        facts = _read_record(record.parent)
        if facts is not None and facts.get("complete", True):
            yield PluginVenv(record.parent, record.parent.name)


def points(prefix: str) -> Iterator[metadata.EntryPoint]:
    """The entry points of all isolated plugins whose groups start with ``prefix``."""
    for venv in plugin_venvs():
        yield from venv.points(prefix)


def write_record(venv: PluginVenv, *, complete: bool, **facts: str | list[str]) -> None:
    """Mark a folder as the environment of a plugin; while it is not complete, nothing uses it."""
    venv.folder.mkdir(parents=True, exist_ok=True)
    data = {"distribution": venv.distribution, "complete": complete, **facts}
    replace_text(venv.folder / RECORD, json.dumps(data, indent=1))


def remove_venv(venv: PluginVenv) -> None:
    """Delete the folder of an isolated plugin, and nothing else.

    Raises:
        PluginError: it is not a folder that ``plugins install --isolated`` made: another place, a link, no record.
    """
    folder, home = venv.folder, venvs_folder()
    why = None
    if folder.parent != home or folder.name != distribution_name(venv.distribution):
        why = f"it is not a plugin's folder in {home}"
    elif home.is_symlink() or folder.is_symlink():
        why = f"{home if home.is_symlink() else folder} is a link"
    elif _read_record(folder) is None:
        why = f"it has no {RECORD} of {venv.distribution}, so nemorl did not make it"
    if why is not None:
        raise PluginError(f"{folder} is not removed: {why}", fix="look at it, and remove it by hand")
    shutil.rmtree(folder)


def _read_record(folder: Path) -> dict[str, Any] | None:
    """The record of a folder; ``None`` where it has none, or one of another distribution."""
    path = folder / RECORD
    try:
        facts = json.loads(path.read_text(encoding="utf-8")) if path.is_file() and not path.is_symlink() else None
    except (OSError, ValueError, RecursionError):
        return None
    ours = isinstance(facts, dict) and normalize(str(facts.get("distribution"))) == folder.name
    return facts if ours else None
