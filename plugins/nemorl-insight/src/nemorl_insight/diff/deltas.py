"""The differences of two runs as things that are put on one by one: keys of the config, folders with other plugins."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as metadata_version
from pathlib import Path
from typing import Any

from nemorl.base.packages.distributions import installed
from nemorl.base.packages.owner import described
from nemorl.config.base import identity
from nemorl.config.load import load_config
from nemorl.errors import UsageError
from nemorl_cli.report.comparing.variants import Difference
from nemorl_trust.lock import FILE, LockedPlugin, locked_plugins, read_lock

from nemorl_insight.diff.run_files import RunFiles

ABSENT = object()
"""In the place of a key that a config does not have."""
OF_A_RUN = ("seed", "run_dir", "model")
"""``model`` is ``policy.model_name`` once more."""


@dataclass(frozen=True)
class ConfigDelta:
    """A key of the config, or a part of the run with all of its options where another part takes its place."""

    path: tuple[str, ...]
    good: Any
    bad: Any

    @property
    def text(self) -> str:
        one, other = (None if value is ABSENT else value for value in (self.good, self.bad))
        return Difference(".".join(self.path), _short(one), _short(other)).text

    def apply(self, data: dict[str, Any]) -> None:
        """Give a config the bad run's value."""
        target = data
        for key in self.path[:-1]:
            target = target.setdefault(key, {})
        if self.bad is ABSENT:
            target.pop(self.path[-1], None)
        else:
            target[self.path[-1]] = deepcopy(self.bad)


@dataclass(frozen=True)
class PluginDelta:
    """A plugin whose two versions are there: one installed, one in a folder that may come before it."""

    name: str
    good: str
    bad: str
    folder: Path
    holds_bad: bool
    """The folder has the bad run's version; else the good run's, and goes in front unless the delta is on."""

    @property
    def text(self) -> str:
        return f"plugin {self.name}: {self.good} -> {self.bad}"


Delta = ConfigDelta | PluginDelta


def _short(value: Any) -> Any:
    """A part of a run by its name."""
    return value["name"] if isinstance(value, Mapping) and "name" in value else value


def config_deltas(good: RunFiles, bad: RunFiles) -> list[ConfigDelta]:
    """Keys that may change results, the seed left out.

    Raises:
        ConfigError: a recorded config does not load any more.
    """
    sides = [identity(load_config(dict(run.data.config)), deepcopy(dict(run.data.config))) for run in (good, bad)]
    return [delta for delta in _between(sides[0], sides[1], ()) if delta.path[0] not in OF_A_RUN]


def _between(good: Any, bad: Any, path: tuple[str, ...]) -> Iterator[ConfigDelta]:
    is_section = isinstance(good, dict) and isinstance(bad, dict)
    is_same_part = is_section and (not path or good.get("name") == bad.get("name"))
    if is_same_part:
        for key in sorted({*good, *bad}):
            yield from _between(good.get(key, ABSENT), bad.get(key, ABSENT), (*path, key))
    elif good is ABSENT or bad is ABSENT or good != bad:
        yield ConfigDelta(path, good, bad)


def plugin_deltas(good: RunFiles, bad: RunFiles, folders: Sequence[Path]) -> list[PluginDelta]:
    """Plugins whose versions differ.

    Args:
        good: A run.
        bad: Another.
        folders: Each with another version of one or more plugins, as ``pip install --target`` makes them.

    Returns:
        Those that a folder has the other version of; the others stay as they are installed.

    Raises:
        UsageError: a folder has neither run's version of any.
    """
    locks = [_locked(run) for run in (good, bad)]
    differing = {
        name: (locks[0][name].version, locks[1][name].version)
        for name in sorted(locks[0].keys() & locks[1].keys())
        if locks[0][name].version != locks[1][name].version
    }
    found: dict[str, PluginDelta] = {}
    for folder in folders:
        held = {owner.name: owner.version for owner in map(described, installed([str(folder)]))}
        of_use = {name: version for name, version in held.items() if version in differing.get(name, ())}
        if not of_use:
            wanted = "; ".join(f"{name} {one} or {other}" for name, (one, other) in differing.items()) or "none differs"
            raise UsageError(
                f"{folder} holds no version of a plugin by which the runs differ ({wanted})",
                fix="pip install --no-deps --target FOLDER NAME==VERSION",
            )
        for name, version in of_use.items():
            one, other = differing[name]
            found[name] = PluginDelta(name, one, other, folder.resolve(), version == other)
    return list(found.values())


def as_installed(good: RunFiles, bad: RunFiles, deltas: Sequence[Delta]) -> list[str]:
    """Plugins that every probe has as they are installed, which is not what both runs had; a text for each."""
    locks = {"the good run": _locked(good), "the bad run": _locked(bad)}
    config = load_config(dict(good.data.config))
    here = {plugin.distribution: plugin for plugin in locked_plugins(config)}
    switched = {delta.name for delta in deltas if isinstance(delta, PluginDelta)}
    found = []
    for name in sorted({name for lock in locks.values() for name in lock} - switched):
        present, had = here.get(name), {run: lock[name] for run, lock in locks.items() if name in lock}
        version = present.version if present is not None else _installed_version(name)
        others = [f"{run} had {_form(one, version)}" for run, one in had.items() if _is_other(one, present, version)]
        if others:
            found.append(f"{name} {version or 'is not installed'} ({', '.join(others)})")
    return found


def _installed_version(name: str) -> str | None:
    with suppress(PackageNotFoundError):
        return metadata_version(name)
    return None


def _is_other(one: LockedPlugin, present: LockedPlugin | None, version: str | None) -> bool:
    return one.version != version or (present is not None and one.files_sha256 != present.files_sha256)


def _form(one: LockedPlugin, version: str | None) -> str:
    return one.version if one.version != version else "other files"


def _locked(run: RunFiles) -> dict[str, LockedPlugin]:
    file = run.path / FILE
    return {plugin.distribution: plugin for plugin in read_lock(file)} if file.is_file() else {}


def folders_in_front(deltas: Sequence[Delta], chosen: Sequence[int]) -> list[Path]:
    """Folders that come before what is installed, where these deltas are on."""
    plugins = [(number, delta) for number, delta in enumerate(deltas) if isinstance(delta, PluginDelta)]
    return [delta.folder for number, delta in plugins if delta.holds_bad == (number in chosen)]
