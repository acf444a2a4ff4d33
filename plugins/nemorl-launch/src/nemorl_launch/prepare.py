"""From a run's config to a job: the launcher with its options, the resolved config and the files, in one folder."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemorl.config.load import load_config
from nemorl.config.run import RunConfig
from nemorl.errors import ConfigError, ConfigIssue, UsageError
from nemorl_base.files import replace_text
from nemorl_base.mappings import apply_overrides, read_source
from nemorl_base.permission import require
from nemorl_report.site_check import site_problems

from nemorl_launch import launchers
from nemorl_launch.base import CONFIG, Job, LauncherConfig

SECTION = "launch"
SHORTEST_SECRET = 6
"""Shorter values are found in any text by chance."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@dataclass(frozen=True)
class Prepared:
    """A job that could be submitted."""

    launcher: LauncherConfig
    launcher_name: str
    job: Job
    files: dict[str, str]
    """All files by name, ``config.yaml`` included."""

    @property
    def submission(self) -> str:
        """The command that submits, as a shell would read it."""
        return shlex.join(self.launcher.submission(self.job))

    def write(self) -> None:
        """Put the files into the folder of the launch."""
        self.job.folder.mkdir(parents=True, exist_ok=True)
        for name, text in self.files.items():
            replace_text(self.job.folder / name, text)


def prepare(source: Path, overrides: Sequence[str], *, on: str | None, name: str | None, root: Path) -> Prepared:
    """Read a run's config and its ``launch`` section, and render what would be submitted.

    Args:
        source: The config file.
        overrides: ``path=value``, of the section as well: ``launch.partition=gpu``.
        on: The launcher; it overrules ``launch.name``, and then only options that all launchers have are kept.
        name: Of the job. Unset: that of the run's directory.
        root: The folder of all launches.

    Raises:
        ConfigError: the config or the section has mistakes, or a secret's value would be written down.
        UsageError: no launcher is given.
    """
    data = apply_overrides(read_source(source), overrides, str(source))
    launcher_name, options = _section(data.pop(SECTION, None) or {}, on)
    require("clusters", launcher_name)
    launcher = launchers.configured(launcher_name, options, f"{source}, section {SECTION}")
    data["cluster"] = _cluster(data.get("cluster") or {}, launcher, str(source))
    config = load_config(data, for_launch=True, for_cluster=True)
    job, config = _job(config, name, root)
    problems = [*launcher.check(job), *site_problems(config, job.run_dir)]
    if problems:
        raise ConfigError(problems, source=f"{source}, section {SECTION}")
    from nemorl.storage.run_directory import to_yaml

    text = to_yaml(config)
    files = {CONFIG: text, **launcher.files(job, text)}
    prepared = Prepared(launcher, launcher_name, job, files)
    _refuse_secrets(launcher.secrets, {**files, "the command": prepared.submission})
    return prepared


def _section(section: Any, on: str | None) -> tuple[str, dict[str, Any]]:
    section = {"name": section} if isinstance(section, str) else section
    if not isinstance(section, Mapping):
        raise ConfigError([ConfigIssue(SECTION, "expected a mapping", "launch: {name: slurm, partition: gpu}")])
    options = {str(key): value for key, value in section.items() if key != "name"}
    named = section.get("name")
    chosen = on or named
    if not isinstance(chosen, str):
        known = ", ".join(sorted(launchers.installed()))
        raise UsageError("no launcher is given", fix=f"--on NAME, or `launch: {{name: NAME}}` in the config: {known}")
    if named is not None and named != chosen:
        options = {key: value for key, value in options.items() if key in LauncherConfig.model_fields}
    return chosen, options


def _cluster(cluster: Any, launcher: LauncherConfig, source: str) -> dict[str, Any]:
    """The ``cluster`` section with the launcher's nodes and GPUs, joining the Ray that the launcher starts.

    Raises:
        ConfigError: both say how many, and not the same.
    """
    if not isinstance(cluster, Mapping):
        raise ConfigError([ConfigIssue("cluster", "expected a mapping")], source=source)
    found = dict(cluster)
    for ours, theirs in {"nodes": "num_nodes", "gpus_per_node": "gpus_per_node"}.items():
        wanted = getattr(launcher, ours)
        if wanted is None:
            continue
        if found.get(theirs) not in (None, wanted):
            message = f"launch.{ours} is {wanted} but cluster.{theirs} is {found[theirs]}"
            raise ConfigError([ConfigIssue(f"{SECTION}.{ours}", message, "give it once")], source=source)
        found[theirs] = wanted
    count = found.get("num_nodes")
    if found.get("address") is None and (launcher.joins_ray or (isinstance(count, int) and count > 1)):
        found["address"] = "auto"
    return found


def _job(config: RunConfig, name: str | None, root: Path) -> tuple[Job, RunConfig]:
    from nemorl.storage.run_directory import run_path

    run_dir = run_path(config).absolute()
    name = name or run_dir.name
    if not _NAME.fullmatch(name):
        raise UsageError(f"{name!r} cannot be the name of a job", fix="letters, digits, '.', '_' and '-': --name NAME")
    cluster = config.cluster
    job = Job(
        name=name,
        folder=root.absolute() / name,
        run_dir=run_dir,
        working_directory=Path.cwd(),
        num_nodes=cluster.num_nodes,
        gpus_per_node=cluster.gpus_per_node or 0,
        workers_per_node=cluster.devices_per_node,
    )
    return job, config.model_copy(update={"run_dir": run_dir})


def _refuse_secrets(names: Sequence[str], texts: Mapping[str, str]) -> None:
    values = {name: os.environ.get(name, "") for name in names}
    found = [
        ConfigIssue(
            "secrets",
            f"the value of {name} stands in {where}",
            "name the variable there, or leave it to the environment",
        )
        for name, value in values.items()
        for where, text in texts.items()
        if len(value) >= SHORTEST_SECRET and (value in text or json.dumps(value)[1:-1] in text)
    ]
    if found:
        raise ConfigError(found, source=SECTION)


def secret_values(launcher: LauncherConfig) -> dict[str, str]:
    """The values of a launcher's secrets, from this process's environment.

    Raises:
        ConfigError: one is not set.
    """
    if not launcher.passes_secrets:
        return {}
    missing = [name for name in launcher.secrets if name not in os.environ]
    if missing:
        issues = [ConfigIssue("secrets", f"{name} is not set here", f"export {name}=…") for name in missing]
        raise ConfigError(issues, source=SECTION)
    return {name: os.environ[name] for name in launcher.secrets}
