"""``plugins.lock.json``: which plugins a run uses, in which version, with a hash of their files.

Written when a run starts and compared when it goes on. The hash covers every file of a distribution (see
:mod:`nemorl_trust.lock_files`), so an edited checkout shows as well as another release.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from nemorl.base.files.atomic import replace_text
from nemorl.base.packages.distributions import guarded
from nemorl.base.packages.plugin_policy import HOUSE
from nemorl.base.packages.standard_plugins import todays_name
from nemorl.config.run import RunConfig
from nemorl.errors import PluginError, UsageError
from nemorl.plugins import PluginEntry, registry
from nemorl.plugins.kinds import PluginConfig
from nemorl.plugins.registry import config_bases
from pydantic import BaseModel

from nemorl_trust.lock_files import files_of, foreign_bytecode, hash_of

FILE = "plugins.lock.json"


@dataclass(frozen=True, order=True)
class LockedPlugin:
    """One distribution that a run takes parts from."""

    distribution: str
    version: str
    files_sha256: str
    """Of relative paths and contents; empty for parts that the running program registered."""
    parts: tuple[str, ...] = ()
    """``kind:name`` of each part that the run uses."""


def locked_plugins(config: RunConfig) -> list[LockedPlugin]:
    """Plugins that the run uses, the kernel included, by distribution."""
    found: dict[str, list[PluginEntry]] = {}
    for entry in plugins_of(config):
        found.setdefault(entry.distribution, []).append(entry)
    offered = entries_by_distribution()
    return sorted(
        LockedPlugin(
            distribution,
            entries[0].version,
            hash_of(files_of(offered[distribution])) if entries[0].point.dist is not None else "",
            tuple(sorted({f"{entry.kind}:{entry.name}" for entry in entries})),
        )
        for distribution, entries in found.items()
    )


def plugins_of(config: RunConfig) -> Iterator[PluginEntry]:
    """The entry of every part that a config selects, nested ones and hooks included, and of the kernel.

    What the running program defined itself and never registered belongs to no plugin.
    """
    named = [("weight_transports", "in_process"), *_names_of(config)]
    if (transport := config.place().transport) is not None:
        named.append(("weight_transports", transport))
    yield from (config.registry.index.find(kind, name) for kind, name in dict.fromkeys(named))
    yield from _toolkits()


def _toolkits() -> Iterator[PluginEntry]:
    """The toolkits that are installed, each as if it offered one part."""
    for distribution in sorted(HOUSE - {"nemorl-core"}):
        with suppress(metadata.PackageNotFoundError):
            dist, module = guarded(metadata.distribution(distribution)), distribution.replace("-", "_")
            point = metadata.EntryPoint(distribution.removeprefix("nemorl-"), module, "nemorl.toolkits")
            vars(point).update(dist=dist)
            yield PluginEntry("toolkits", point.name, distribution, dist.version, module, point)


def _names_of(config: RunConfig) -> Iterator[tuple[str, str]]:
    policies = [auxiliary.policy for auxiliary in config.auxiliary_models.values()]
    for part in (config, *parts_of(config), *parts_of(policies)):
        with suppress(PluginError):  # defined by the running program
            kind = next(kind for kind, base in config_bases().items() if isinstance(part, base))
            yield kind, registry().name_of(kind, type(part))


def refuse_other_plugins(config: RunConfig, record: Path) -> None:
    """Hold a run to the plugins of a record, and those to their sources.

    Raises:
        UsageError: there is no record, the plugins differ, or compiled files do not come from the sources; says how.
    """
    present = locked_plugins(config)
    found = [*differences(read_lock(record), present), *bytecode_problems(present)]
    if found:
        raise UsageError(
            f"the plugins differ from {record}:\n" + "\n".join(f"  - {line}" for line in found),
            fix="install what the record names and remove foreign bytecode, or run without --locked",
        )


def bytecode_problems(plugins: Sequence[LockedPlugin]) -> list[str]:
    """Compiled files of these plugins that Python would run in the place of their sources, a line each."""
    lines = []
    offered = entries_by_distribution()
    for plugin in plugins:
        entries = offered.get(plugin.distribution) if plugin.files_sha256 else None
        if entries:
            foreign = foreign_bytecode(files_of(entries), entries[0].point.dist)
            lines += [f"{plugin.distribution}: {path} does not come from the source beside it" for path in foreign]
    return lines


def write_lock(folder: Path, plugins: Sequence[LockedPlugin]) -> None:
    replace_text(folder / FILE, json.dumps({"plugins": [asdict(plugin) for plugin in plugins]}, indent=1))


def read_lock(path: Path) -> list[LockedPlugin]:
    """The lock that a run recorded.

    Raises:
        UsageError: there is no record, or it cannot be read.
    """
    if not path.is_file():
        raise UsageError(
            f"no record of plugins in {path}", fix="start the run once without --locked, or give --lock-file"
        )
    try:
        data = json.loads(path.read_text())["plugins"]
        told = [{**plugin, "parts": tuple(plugin["parts"])} for plugin in data]
        return [LockedPlugin(**{**plugin, "distribution": todays_name(plugin["distribution"])}) for plugin in told]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path} cannot be read: {error}", fix="give the plugins.lock.json of a run") from error


def differences(recorded: Sequence[LockedPlugin], present: Sequence[LockedPlugin]) -> list[str]:
    """How two plugin sets differ, a line each; empty when they are the same."""
    old, new = ({plugin.distribution: plugin for plugin in plugins} for plugins in (recorded, present))
    lines = [f"{name} {old[name].version} is not used any more" for name in sorted(old.keys() - new.keys())]
    lines += [f"{name} {new[name].version} was not used" for name in sorted(new.keys() - old.keys())]
    for name in sorted(old.keys() & new.keys()):
        before, after = old[name], new[name]
        if before.version != after.version:
            lines.append(f"{name} was {before.version}, is {after.version}")
        elif before.files_sha256 != after.files_sha256:
            lines.append(f"{name} {after.version}: its files have changed")
        if before.parts != after.parts:
            lines.append(f"{name}: the run used {', '.join(before.parts)}, now {', '.join(after.parts)}")
    return lines


def parts_of(value: Any) -> Iterator[PluginConfig]:
    """Plugin configs anywhere below a config."""
    if isinstance(value, PluginConfig):
        yield value
    if isinstance(value, BaseModel):
        for name in type(value).model_fields:
            yield from parts_of(getattr(value, name))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from parts_of(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from parts_of(item)


def entries_by_distribution() -> dict[str, list[PluginEntry]]:
    """All that the installed distributions offer."""
    found: dict[str, list[PluginEntry]] = {}
    for entry in (*_toolkits(), *registry().index.entries):
        if entry.value:
            found.setdefault(entry.distribution, []).append(entry)
    return found
