"""The site's policy over a run, before anything is loaded: its models, datasets, engines, cluster and audit log.

Plugins are not asked about here: the policy keeps those that it refuses from being loaded at all
(:mod:`nemorl.base.packages.plugin_policy`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from nemorl.base.packages.plugin_policy import HOUSE, normalize
from nemorl.base.text.naming import Named, is_url
from nemorl.base.text.reading import expanded, is_folder
from nemorl.config.cluster import ClusterConfig
from nemorl.config.run import RunConfig
from nemorl.errors import ConfigError, ConfigIssue, PluginError, StorageError, UsageError
from nemorl.plugins import registry
from nemorl.plugins.kinds import DatasetConfig, GenerationBackendConfig, PluginConfig, TrainingBackendConfig
from nemorl.plugins.registry import config_bases

from nemorl_trust.audit.recording import audit_log, demanded_folder
from nemorl_trust.encryption import PLAINTEXT, host_names, origin, origins, plaintext_problem
from nemorl_trust.lock import entries_by_distribution, parts_of, plugins_of
from nemorl_trust.ray_security import ray_address
from nemorl_trust.signatures import signature_problems
from nemorl_trust.site import asked, require
from nemorl_trust.site_policy import SitePolicy, links_out_of, names_of_path, site_policies

ENGINES = (TrainingBackendConfig, GenerationBackendConfig)
LOADS_CODE = re.compile(
    r"PYTHON(PATH|STARTUP|HOME|USERBASE|PLATLIBDIR|PYCACHEPREFIX|BREAKPOINT)|LD_(PRELOAD|LIBRARY_PATH|AUDIT)"
    r"|PATH|BASH_ENV|ENV|CC|CXX|GCONV_PATH|RAY_.*(PLUGIN|HOOK|RUNTIME_ENV).*|NEMORL_(SITE_)?POLICY",
)
"""Environment variables by which a process gets other code than is installed."""
RAY_INSTALLS = ("pip", "uv", "conda")
RAY_SETTINGS = ("excludes", "config", "nsight")
"""Keys of Ray's runtime environment that bring packages, and those that bring nothing; all others may bring code."""
BESIDE = ("loggers.", "plugins.")
"""Parts that take no part in computing: their servers may be denied by name, and need not be allowed as engines."""


class Use(NamedTuple):
    """Something that a run uses."""

    path: str
    """Of the key that says so."""
    kind: str
    names: tuple[str, ...]
    needs_leave: bool = True
    """Where rules allow some of this kind, it has to be among them. ``False``: it is asked whether it is denied."""
    replaces: bool = False
    """It brings packages in the place of those that are installed, signed ones among them."""


def site_problems(
    config: RunConfig, run_dir: Path, warn: Callable[[str], None] = lambda _: None
) -> Iterator[ConfigIssue]:
    """Refusals of the site for this process's user in a run.

    Args:
        config: The run.
        run_dir: Where it would write.
        warn: Told of nothing.
    """
    if not site_policies():
        return
    for use in {use[1:]: use for use in reversed([*uses_of(config)])}.values():  # each thing once, by its first key
        found = asked(use.kind, *use.names, needs_leave=use.needs_leave, replaces=use.replaces)
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
    """The counterpart of :func:`refuse` for a command that has no config of a run.

    Raises:
        UsageError: The site does not admit this model, this engine or a server of it.
    """
    require("models", *names_of_path(model))
    for use in (_engine(backend), *_named(backend.named_values("generation.backend"))):
        require(use.kind, *use.names, needs_leave=use.needs_leave, replaces=use.replaces)
    name = _name(backend)
    offered = [e.distribution for e in registry().index.of_kind("generation_backends") if name in (e.name, e.id)]
    for message in signature_problems({*offered, *HOUSE & entries_by_distribution().keys()}):
        raise UsageError(message, fix=f"ask {_contact()}")


def _contact() -> str:
    return next((policy.contact for policy in site_policies() if policy.signed_plugins), SitePolicy.contact)


def uses_of(config: RunConfig) -> Iterator[Use]:
    """Everything of a config that rules may be about, plugins left out."""
    policies = {role: auxiliary.policy for role, auxiliary in config.auxiliary_models.items()}
    yield Use("cluster", "clusters", _cluster(config.cluster))
    for part in (*parts_of(config), *parts_of(list(policies.values()))):
        if isinstance(part, ENGINES):
            yield _engine(part)
        elif isinstance(part, DatasetConfig):
            is_named = any(named.kind == "dataset" for named in part.named_values())
            yield Use("data", "datasets", (_name(part),), needs_leave=not is_named)
    yield from _named(config.named_values())
    for role, policy in policies.items():
        yield from _named(policy.named_values(role))
    yield from _of_ray(config.cluster.runtime_env)


def _engine(part: PluginConfig) -> Use:
    path = "generation.backend" if isinstance(part, GenerationBackendConfig) else "policy.backend"
    return Use(path, "engines", (_name(part),))


def _named(values: Iterator[Named]) -> Iterator[Use]:
    """Things that the fields of configs name, as rules know them."""
    for path, kind, value, _ in values:
        if path == "cluster.address":
            continue  # asked about as a cluster
        if kind in ("model", "served_model"):
            yield from _at_paths(path, "models", value) if kind == "model" else [Use(path, "models", (value,))]
        elif kind == "dataset":
            yield from _at_paths(path, "datasets", value)
        elif kind == "file":
            yield from _denied_file(path, value)
        elif kind == "server":
            yield from _of_server(path, value)
        elif kind == "interpreter":
            yield Use(path, "code", tuple(names_of_path(value)), replaces=True)
        elif kind == "command":
            yield Use(path, "code", tuple(dict.fromkeys(name for word in value for name in names_of_path(word))))
        elif kind == "code":
            yield Use(path, "code", (*names_of_path(value.rpartition(":")[0] or value), value))
        elif kind == "variables":
            yield from _of_variables(path, value)


def _at_paths(path: str, kind: str, text: str) -> Iterator[Use]:
    """A model or dataset, and where it is a folder, all that links in it lead to: each has to be allowed by itself."""
    yield Use(path, kind, tuple(names_of_path(text)))
    folder = expanded(text)
    if is_folder(folder):
        inside = Path(os.path.realpath(folder))
        for target in links_out_of(inside):
            yield Use(path, kind, (target,))


def _denied_file(path: str, text: str) -> Iterator[Use]:
    if is_url(text):
        yield from _of_server(path, text)
        return
    for kind in ("datasets", "models"):
        yield Use(path, kind, tuple(names_of_path(text)), needs_leave=False)


def _of_server(path: str, text: str) -> Iterator[Use]:
    """A server by scheme, host and port, which a path within it cannot imitate, and by any other name of its host."""
    if not is_url(text):
        yield Use(path, "engines", (text, *host_names(text)), needs_leave=False)
        return
    yield Use(path, "engines", (*origins(text), text), needs_leave=not path.startswith(BESIDE))
    if plaintext_problem(text) is not None:
        yield Use(f"{path.rpartition('.')[0]}.plaintext", "unlock", (PLAINTEXT,))


def _of_variables(path: str, variables: Mapping[str, str]) -> Iterator[Use]:
    for name, value in variables.items():
        place = f"{path}.{name}"
        if is_url(value):
            yield Use(place, "engines", (*origins(value), value), needs_leave=False)
        elif LOADS_CODE.fullmatch(name):
            for item in filter(None, value.split(os.pathsep)):
                yield Use(place, "code", tuple(names_of_path(item)), replaces=True)
        else:
            yield from _denied_file(place, value)


def _of_ray(environment: Mapping[str, Any]) -> Iterator[Use]:
    """Packages and code that Ray brings to its workers. Variables and interpreters have options of their own."""
    for key, value in environment.items():
        path = f"cluster.runtime_env.{key}"
        if key in RAY_INSTALLS:
            for text in _texts(value):
                yield Use(path, "install", (_distribution(text), text), replaces=True)
        elif key not in RAY_SETTINGS:
            for text in _texts(value):
                yield Use(path, "code", tuple(names_of_path(text)), replaces=True)


def _distribution(requirement: str) -> str:
    """Name of what a line for pip installs; the line itself where that is a file or an address."""
    found = re.match(r"[A-Za-z0-9][A-Za-z0-9._-]*(?=\s*($|[\[<>=!~;@ ]))", requirement)
    return normalize(found[0]) if found else requirement


def _cluster(cluster: ClusterConfig) -> tuple[str, ...]:
    """``local``, ``private`` (a Ray of the run's own), or the address with its port, and as it was written."""
    if not cluster.uses_ray or cluster.address is None:
        return ("private" if cluster.uses_ray else "local",)
    try:
        address = ray_address(cluster.address)
    except UsageError:  # none is there
        return (cluster.address,)
    scheme, _, rest = address.rpartition("://")
    found = [origin(f"{scheme or 'ray'}://{rest}").partition("://")[2]]
    names = [f"{host}:{found[0].rpartition(':')[2]}" for host in host_names(address)]
    return tuple(dict.fromkeys((*found, *names, *host_names(address), *([address] if scheme else []), cluster.address)))


def _name(part: PluginConfig) -> str:
    kind = next(kind for kind, base in config_bases().items() if isinstance(part, base))
    try:
        return registry().name_of(kind, type(part))
    except PluginError:  # defined by the running program
        return type(part).__name__


def _texts(value: Any) -> Iterator[str]:
    """Every text in plain data."""
    if isinstance(value, str | Path):
        yield str(value)
    for item in value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ():
        yield from _texts(item)
