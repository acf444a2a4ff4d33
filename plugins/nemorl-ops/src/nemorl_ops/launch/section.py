"""The section ``launch`` of a run's config: which launcher, with which options, and what they say of the run's cluster.

``nemorl.load_config`` reads it through a slot, so every command takes a config that has one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from nemorl.base.text.pydantic_words import inlined
from nemorl.errors import ConfigError, ConfigIssue, NemorlError, UsageError
from nemorl.plugins.slots import ConfigSection

from nemorl_ops.launch import launchers
from nemorl_ops.launch.base import LauncherConfig

SECTION = "launch"
CLUSTER = {"nodes": "num_nodes", "gpus_per_node": "gpus_per_node"}
"""Options of all launchers, and the keys of ``cluster`` that say the same."""


def without_section(data: Mapping[str, Any]) -> tuple[dict[str, Any], list[ConfigIssue]]:
    """A config without its section ``launch``, on the nodes that the section says, and what is wrong in it.

    Args:
        data: The config as it was written, changes applied.

    >>> without_section({"algorithm": "sft", "launch": {"name": "slurm", "nodes": 2}})
    ({'algorithm': 'sft', 'cluster': {'num_nodes': 2, 'address': 'auto'}}, [])
    """
    rest = {key: value for key, value in data.items() if key != SECTION}
    if data.get(SECTION) is None:
        return rest, []
    try:
        _, launcher = read_section(data[SECTION], on=None, source="config")
        return on_its_nodes(rest, launcher), list(contradictions(rest, launcher))
    except ConfigError as error:
        return rest, list(error.problems)
    except NemorlError as error:
        return rest, [ConfigIssue(f"{SECTION}.name", error.message, error.fix)]


def schema_of_section() -> dict[str, Any]:
    """The JSON schema of the section ``launch``, for editors: one object per launcher that can be loaded.

    >>> [kind["type"] for kind in schema_of_section()["anyOf"]][:2]
    ['null', 'string']
    """
    kinds: list[dict[str, Any]] = [{"type": "null"}, {"type": "string", "enum": sorted(launchers.installed())}]
    for name in sorted(launchers.installed()):
        try:
            found = launchers.load(name).model_json_schema()
        except NemorlError:
            continue  # a broken launcher must not take the editor's schema down
        found = inlined(found, found.pop("$defs", {}))
        found["properties"] = {"name": {"const": name}, **found["properties"]}
        kinds.append({**found, "required": ["name"]})
    return {"description": "Where `nemorl train` submits the run. Unset: it runs on this machine.", "anyOf": kinds}


LAUNCH = ConfigSection(without_section, schema_of_section)


def read_section(section: Any, *, on: str | None, source: str) -> tuple[str, LauncherConfig]:
    """The launcher of a section, by name and with its options.

    Args:
        section: What the config says: a launcher's name, a mapping, or nothing.
        on: Another launcher, which gets those of the section's options that all launchers have.
        source: What errors call the config.

    Raises:
        ConfigError: every mistake in it.
        PluginNotFoundError: there is no such launcher.
        UsageError: none is given.
    """
    section = for_launcher({} if section is None else section, on)
    section = {"name": section} if isinstance(section, str) else section
    if not isinstance(section, Mapping):
        mistake = ConfigIssue(SECTION, "expected a mapping", "launch: {name: slurm, partition: gpu}")
        raise ConfigError([mistake], source=source)
    options = {str(key): value for key, value in section.items() if key != "name"}
    chosen = on or section.get("name")
    if not isinstance(chosen, str):
        known = ", ".join(sorted(launchers.installed()))
        fix = f"--on NAME, or `launch: {{name: NAME}}` in the config: {known}"
        raise UsageError("no launcher is given", fix=f"write name: {options['on']}" if "on" in options else fix)
    try:
        return chosen, launchers.configured(chosen, options, source)
    except ConfigError as error:
        raise ConfigError(list(within_section(error.problems)), source=source) from None


def for_launcher(section: Any, on: str | None) -> Any:
    """A section ``launch`` for the launcher ``on``: of another launcher's, only the options that all launchers have.

    >>> for_launcher({"name": "slurm", "partition": "gpu", "nodes": 2}, "ssh")
    {'name': 'ssh', 'nodes': 2}
    """
    options = {"name": section} if isinstance(section, str) else section
    if on is None or not isinstance(options, Mapping) or options.get("name") in (None, on):
        return section
    return {"name": on, **{key: value for key, value in options.items() if key in LauncherConfig.model_fields}}


def within_section(problems: Iterable[ConfigIssue]) -> Iterator[ConfigIssue]:
    """Problems of a launcher, whose paths begin at the section, with paths of the whole config."""
    for problem in problems:
        yield replace(problem, path=".".join(filter(None, (SECTION, problem.path))))


def contradictions(data: Mapping[str, Any], launcher: LauncherConfig) -> Iterator[ConfigIssue]:
    """Numbers that the section and ``cluster`` both say, and not the same."""
    cluster = data.get("cluster")
    for ours, theirs in CLUSTER.items():
        wanted = getattr(launcher, ours)
        given = cluster.get(theirs) if isinstance(cluster, Mapping) else None
        if wanted is not None and given not in (None, wanted):
            message = f"launch.{ours} is {wanted} but cluster.{theirs} is {given}"
            yield ConfigIssue(f"{SECTION}.{ours}", message, "give it once")


def on_its_nodes(data: Mapping[str, Any], launcher: LauncherConfig) -> dict[str, Any]:
    """The config on the launcher's nodes and GPUs, joining the Ray that the launcher starts."""
    cluster = data.get("cluster") or {}
    if not isinstance(cluster, Mapping):
        return dict(data)  # a mistake, which whoever reads the config will report
    given = {theirs: getattr(launcher, ours) for ours, theirs in CLUSTER.items()}
    found = {**cluster, **{key: value for key, value in given.items() if value is not None}}
    count = found.get("num_nodes")
    if found.get("address") is None and (launcher.joins_ray or (isinstance(count, int) and count > 1)):
        found["address"] = "auto"
    return {**data, "cluster": found} if found else dict(data)
