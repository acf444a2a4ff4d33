"""Who may be loaded: the run's ``plugins.allow``/``block``/``prefer``, within those of the user and of the site.

A site file and a user file (``config.yaml`` in the folders that :func:`policy_files` names) hold the same keys under
``plugins:``. They narrow each other: a distribution is admitted when every level admits it. Acting on distributions by
name is no sandbox; what is admitted runs with the user's rights.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from nemorl.base.packages.site import site
from nemorl.base.packages.standard_plugins import todays_name
from nemorl.base.text.reading import may_be_there, read_text

HOUSE = frozenset(f"nemorl-{name}" for name in ("core", "tensors", "media", "rl", "trust", "cli", "testing"))
"""The kernel and the toolkits: always admitted."""
KEYS = ("allow", "block", "prefer", "indexes")


def normalize(distribution: str) -> str:
    """PEP 503 form, by today's name: ``My_Plugin`` and ``my-plugin`` are one distribution."""
    return todays_name(re.sub(r"[-_.]+", "-", distribution).lower())


@dataclass(frozen=True)
class PluginPolicy:
    """One level of policy, and the level around it."""

    allow: tuple[str, ...] | None = None
    """Distributions that may be used. Unset: all."""
    block: tuple[str, ...] = ()
    """Distributions that may not, applied after ``allow``."""
    prefer: Mapping[str, str] = field(default_factory=dict)
    """``kind.name`` -> distribution that wins a shared name."""
    source: str = "the config"
    """Who says so, for messages."""
    outer: PluginPolicy | None = None
    import_timeout_s: float = 300.0
    """Longest time that importing one plugin may take."""

    def refusal(self, distribution: str) -> str | None:
        """Why a distribution may not be used; ``None`` if it may."""
        name = normalize(distribution)
        if name in HOUSE:
            return None
        if name in map(normalize, self.block):
            return f"plugins.block in {self.source} names it"
        if self.allow is not None and name not in map(normalize, self.allow):
            return f"plugins.allow in {self.source} does not name it"
        return self.outer.refusal(distribution) if self.outer is not None else None

    def admits(self, distribution: str) -> bool:
        return self.refusal(distribution) is None

    def preferred(self, key: str) -> str | None:
        """The distribution that wins ``kind.name``; the innermost level decides."""
        if key in self.prefer or self.outer is None:
            return self.prefer.get(key)
        return self.outer.preferred(key)

    def within(self, outer: PluginPolicy) -> PluginPolicy:
        """This policy as a level inside another one."""
        inner = self.outer.within(outer) if self.outer is not None else outer
        return replace(self, outer=inner)


@dataclass(frozen=True)
class SiteLevel(PluginPolicy):
    """The level around all others: what the rules of the site's policy say to this user (``plugins``)."""

    def refusal(self, distribution: str) -> str | None:
        name = normalize(distribution)
        found = site().plugin_refusal(name) if name not in HOUSE else None
        return found or super().refusal(distribution)


def policy_files() -> tuple[Path, ...]:
    """Where the site's and the user's settings are, the site's first; they need not exist."""
    from platformdirs import site_config_path, user_config_path

    return site_config_path("nemorl") / "config.yaml", user_config_path("nemorl") / "config.yaml"


@cache
def machine_policy() -> PluginPolicy:
    """The site's policy with the user's inside it, read once."""
    policy = SiteLevel() if site().has_policy() else PluginPolicy()
    for path in policy_files():
        if may_be_there(path):
            policy = read_policy(path).within(policy)
    return policy


def read_policy(path: Path) -> PluginPolicy:
    """The ``plugins:`` of a settings file. One that cannot be understood admits nobody: it was meant to forbid."""
    from nemorl.base.text.yaml_text import parse_yaml

    try:
        return _checked(parse_yaml(read_text(path)), str(path))
    except (OSError, ValueError) as error:
        why = " ".join(str(error).split())
        return PluginPolicy(allow=(), source=f"{path} (it cannot be used: {why})")


def _checked(data: Any, source: str) -> PluginPolicy:
    data = {} if data is None else data
    if not isinstance(data, Mapping) or set(data) - {"plugins"}:
        raise ValueError("expected one key, `plugins:`")
    plugins = {} if data.get("plugins") is None else data["plugins"]
    if not isinstance(plugins, Mapping) or set(plugins) - set(KEYS):
        raise ValueError(f"the keys under `plugins:` are {', '.join(KEYS)}")
    allow, block, prefer = (plugins.get(key) for key in ("allow", "block", "prefer"))
    for key, names in (("allow", allow), ("block", block)):
        if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
            raise ValueError(f"plugins.{key} is a list of distribution names")
    if prefer is not None and not (isinstance(prefer, Mapping) and all(isinstance(to, str) for to in prefer.values())):
        raise ValueError("plugins.prefer maps kind.name to a distribution")
    return PluginPolicy(None if allow is None else tuple(allow), tuple(block or ()), dict(prefer or {}), source)
