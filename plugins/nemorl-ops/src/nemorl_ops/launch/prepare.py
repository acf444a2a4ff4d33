"""From a run's config to a job: the launcher with its options, the resolved config and the files, in one folder."""

from __future__ import annotations

import json
import math
import os
import re
import secrets
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from nemorl.base.files.atomic import replace_text
from nemorl.base.text.mappings import apply_overrides, read_source
from nemorl.config.load import load_config
from nemorl.config.run import RunConfig
from nemorl.errors import ConfigError, ConfigIssue, UsageError
from nemorl_trust.secret_check import secret_problems, secrets_in
from nemorl_trust.site import require
from nemorl_trust.site_check import site_problems

from nemorl_ops.launch.base import CONFIG, Job, LauncherConfig
from nemorl_ops.launch.planning import Planned, planned
from nemorl_ops.launch.section import SECTION, contradictions, for_launcher, on_its_nodes, read_section, within_section

RAY_AND_DRIVER, MOST_GRADERS = 2, 8
"""Cores of a node for Ray's own processes and the driver; and at most for what grades responses."""
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
    plan: Planned

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
    written = read_source(source)
    if SECTION in written:  # before the overrides, which are for the launcher that was asked for
        written = {**written, SECTION: for_launcher(written[SECTION], on)}
    data = apply_overrides(written, overrides, str(source))
    launcher_name, launcher = read_section(data.pop(SECTION, None), on=on, source=str(source))
    require("clusters", launcher_name)
    if wrong := list(contradictions(data, launcher)):
        raise ConfigError(wrong, source=str(source))
    plan = planned(on_its_nodes(data, launcher), launcher)
    if plan.cannot_fit:
        raise ConfigError([_cannot_fit(plan)], source=str(source))
    config = load_config(plan.data, for_launch=True, for_cluster=True)
    job, config = _job(config, name, root)
    problems = [
        *within_section(launcher.check(job)),
        *site_problems(config, job.run_dir),
        *secret_problems(config, job.run_dir),
        *secrets_in(launcher.model_dump(mode="json"), SECTION),
    ]
    if problems:
        raise ConfigError(problems, source=str(source))
    from nemorl.storage.run_directory import to_yaml

    text = to_yaml(config)
    files = {CONFIG: text, **launcher.files(job, text)}
    prepared = Prepared(launcher, launcher_name, job, files, plan)
    _refuse_secrets(launcher.secrets, {**files, "the command": prepared.submission})
    return prepared


def _job(config: RunConfig, name: str | None, root: Path) -> tuple[Job, RunConfig]:
    from nemorl.storage.run_directory import run_path

    run_dir = run_path(config).absolute()
    name = name or run_dir.name
    if not _NAME.fullmatch(name):
        raise UsageError(f"{name!r} cannot be the name of a job", fix="letters, digits, '.', '_' and '-': --name NAME")
    cluster, sampler = config.cluster, config.sampler
    width = 1 if sampler is None else sampler.backend.devices_per_replica
    apart = 0 if cluster.colocated or sampler is None else cluster.generation_replicas(width) * width
    job = Job(
        name=name,
        folder=root.absolute() / name,
        run_dir=run_dir,
        working_directory=Path.cwd(),
        num_nodes=cluster.num_nodes,
        gpus_per_node=cluster.gpus_per_node or 0,
        workers_per_node=cluster.devices_per_node,
        plaintext=cluster.security.plaintext,
        generation_devices=apart,
        engine_devices=width,
        token=secrets.token_hex(4),
        cores_per_node=_cores_per_node(config),
    )
    return job, config.model_copy(update={"run_dir": run_dir})


def _cores_per_node(config: RunConfig) -> int:
    """Cores for the workers, the scheduler that each engine has, graders, and for Ray and the driver together."""
    cluster, sampler = config.cluster, config.sampler
    workers = math.ceil(cluster.devices_per_node * cluster.cpus_per_worker)
    engines = 0 if sampler is None else math.ceil(cluster.devices_per_node / sampler.backend.devices_per_replica)
    grading = 0 if sampler is None else min(cluster.devices_per_node, MOST_GRADERS)
    return workers + engines + grading + RAY_AND_DRIVER


def _cannot_fit(plan: Planned) -> ConfigIssue:
    fix = "take more devices (launch.nodes), a smaller model or LoRA; launch.plan=false submits it anyway"
    return ConfigIssue("policy", f"nemorl plan: {plan.words}", fix)


def _refuse_secrets(names: Sequence[str], texts: Mapping[str, str]) -> None:
    values = {name: os.environ.get(name, "") for name in names}
    found = [
        ConfigIssue(
            f"{SECTION}.secrets",
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
        issues = [ConfigIssue(f"{SECTION}.secrets", f"{name} is not set here", f"export {name}=…") for name in missing]
        raise ConfigError(issues, source=SECTION)
    return {name: os.environ[name] for name in launcher.secrets}
