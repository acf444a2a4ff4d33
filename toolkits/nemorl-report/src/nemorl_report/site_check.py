"""The site's policy over a run, before anything is loaded: its models, datasets, engines, cluster and audit log.

Plugins are not asked about here: the policy keeps those that it refuses from being loaded at all
(:mod:`nemorl_base.plugin_policy`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from nemorl.config.cluster import ClusterConfig
from nemorl.config.run import RunConfig
from nemorl.errors import ConfigError, ConfigIssue, PluginError, StorageError, UsageError
from nemorl.plugins import registry
from nemorl.plugins.kinds import (
    DatasetConfig,
    EnvironmentConfig,
    GenerationBackendConfig,
    HookConfig,
    LoggerConfig,
    PluginConfig,
    TrainingBackendConfig,
)
from nemorl.plugins.registry import config_bases
from nemorl_base.audit.recording import audit_log, demanded_folder
from nemorl_base.encryption import PLAINTEXT, origin, plaintext_problem
from nemorl_base.permission import asked, require
from nemorl_base.plugin_policy import HOUSE
from nemorl_base.ray_security import ray_address
from nemorl_base.site_policy import SitePolicy, names_of_path, site_policies
from pydantic import BaseModel

from nemorl_report.lock import entries_by_distribution, parts_of, plugins_of
from nemorl_report.signatures import signature_problems

ENGINES = (TrainingBackendConfig, GenerationBackendConfig)


URL = re.compile(r"[a-z][a-z0-9+.-]*://[^\s/\[\]]+(:\d+)?\S*|[a-z][a-z0-9+.-]*://\[[0-9a-f:.]+\]\S*", re.IGNORECASE)
"""A text that is the address of a server and nothing else."""


class Use(NamedTuple):
    """Something that a run uses."""

    path: str
    """Of the key that says so."""
    kind: str
    names: tuple[str, ...]


def site_problems(
    config: RunConfig, run_dir: Path, warn: Callable[[str], None] = lambda _: None
) -> Iterator[ConfigIssue]:
    """What the site does not let whose process this is do in a run.

    Args:
        config: The run.
        run_dir: Where it would write.
        warn: Told of nothing.
    """
    if not site_policies():
        return
    for use in dict.fromkeys(uses_of(config)):
        found = asked(use.kind, *use.names)
        if found is not None:
            yield ConfigIssue(use.path, found.message, found.fix)
    for message in signature_problems({entry.distribution for entry in plugins_of(config)}):
        yield ConfigIssue("plugins", message, f"ask {_contact()}", here=True)
    log = audit_log()
    if demanded_folder() is not None and log is not None:
        try:
            log.check()
        except StorageError as error:
            message = f"the site demands an audit log, and it cannot be written: {error.message}"
            yield ConfigIssue("", message, error.fix, here=True)


def refuse(config: RunConfig) -> None:
    """
    Raises:
        ConfigError: The site does not admit what this config uses.
    """
    if found := list(site_problems(config, Path())):
        raise ConfigError(found, source="before loading anything")


def require_engine(model: str, backend: GenerationBackendConfig) -> None:
    """What :func:`refuse` is for a command that has no config of a run.

    Raises:
        UsageError: The site does not admit this model, this engine or a server of it.
    """
    require("models", *names_of_path(model))
    for use in _of_engine(backend):
        require(use.kind, *use.names)
    name = _name(backend)
    offered = [e.distribution for e in registry().index.of_kind("generation_backends") if name in (e.name, e.id)]
    for message in signature_problems({*offered, *HOUSE & entries_by_distribution().keys()}):
        raise UsageError(message, fix=f"ask {_contact()}")


def _contact() -> str:
    return next((policy.contact for policy in site_policies() if policy.signed_plugins), SitePolicy.contact)


def uses_of(config: RunConfig) -> Iterator[Use]:
    """Everything of a config that rules may be about, plugins left out."""
    policies = [auxiliary.policy for auxiliary in config.auxiliary_models.values()]
    for policy in (config.policy, *policies):
        yield Use("policy.model_name", "models", tuple(names_of_path(policy.model_name)))
    yield Use("cluster", "clusters", _cluster(config.cluster))
    for part in (*parts_of(config), *parts_of(policies)):
        if isinstance(part, DatasetConfig):
            yield from _of_dataset(part)
        elif isinstance(part, ENGINES):
            yield from _of_engine(part)
        elif isinstance(part, EnvironmentConfig):
            yield from _of_addresses("environment", part)
        elif isinstance(part, (LoggerConfig, HookConfig)):
            yield from (use for use in _of_addresses("plugins", part) if use.kind == "unlock")


def _cluster(cluster: ClusterConfig) -> tuple[str, ...]:
    """``local``, ``private`` (a Ray of the run's own), or the address with its port, and as it was written."""
    if not cluster.uses_ray or cluster.address is None:
        return ("private" if cluster.uses_ray else "local",)
    try:
        address = ray_address(cluster.address)
    except UsageError:  # none is there
        return (cluster.address,)
    host, _, port = address.rpartition(":")
    return f"{host.rstrip('.').lower()}:{port}", host, cluster.address


def _of_dataset(part: DatasetConfig) -> Iterator[Use]:
    """Its files or its name on the hub; its own name where it has neither."""
    texts = dict(_texts(part))
    paths = [text for path, text in texts.items() if path.rpartition(".")[2].endswith("path") and text]
    for text in paths or [_name(part)]:
        yield Use("data", "datasets", (*names_of_path(text), _name(part), *texts.values()))


def _of_engine(part: PluginConfig) -> Iterator[Use]:
    """Its name, and the addresses of servers that it uses, each by itself."""
    path = "generation.backend" if isinstance(part, GenerationBackendConfig) else "policy.backend"
    yield Use(path, "engines", (_name(part),))
    yield from _of_addresses(path, part)


def _of_addresses(path: str, part: PluginConfig) -> Iterator[Use]:
    """The servers that a part uses, each by scheme, host and port, which a path within it cannot imitate."""
    for _, text in _texts(part):
        if URL.fullmatch(text) is None:
            continue
        yield Use(path, "engines", (origin(text), text))
        if plaintext_problem(text) is not None:
            yield Use(f"{path}.plaintext", "unlock", (PLAINTEXT,))


def _name(part: PluginConfig) -> str:
    kind = next(kind for kind, base in config_bases().items() if isinstance(part, base))
    try:
        return registry().name_of(kind, type(part))
    except PluginError:  # defined by the running program
        return type(part).__name__


def _texts(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Every text and path below a config, with where it is, those of parts within it left out."""
    if isinstance(value, PluginConfig) and path:
        return
    if isinstance(value, BaseModel):
        value = {name: getattr(value, name) for name in type(value).model_fields}
    if isinstance(value, str | Path):
        yield path, str(value)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _texts(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from _texts(item, f"{path}.{number}")
