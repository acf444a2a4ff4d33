"""``plugins:`` of a run: which installed distributions it may use, and which hooks it turns on."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from pydantic import Field, ValidationError, ValidationInfo, model_validator

from nemorl.base.packages.plugin_policy import KEYS, PluginPolicy, normalize
from nemorl.base.packages.standard_plugins import STANDARD_PLUGINS
from nemorl.base.text.reading import shown
from nemorl.base.text.suggest import did_you_mean
from nemorl.config.base import PLUGINS, Config
from nemorl.config.component import Component
from nemorl.errors import ConfigIssue
from nemorl.plugins.index import KINDS
from nemorl.plugins.kinds import HookConfig, ReportSectionConfig
from nemorl.plugins.registry import registry

DISTRIBUTION = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
"""A distribution's name (PEP 508)."""
POLICY = (*KEYS, "import_timeout_s")
"""Fields that make up the policy."""
TYPO_LIKENESS = 0.85
"""How alike two names of distributions are when one is taken for a slip of the other."""


class PluginsConfig(Config):
    """Which installed plugins this run may use. Not a sandbox: what is allowed runs with your rights.

    >>> PluginsConfig(block=["acme-math"]).allow is None
    True
    """

    allow: tuple[str, ...] | None = None
    """Distributions that may be used. Unset: all installed."""
    block: tuple[str, ...] = ()
    """Distributions that may not, applied after ``allow``."""
    prefer: dict[str, str] = Field(default_factory=dict)
    """Who wins a name that several distributions provide: ``{"environments.math": "acme-math"}``."""
    import_timeout_s: float = Field(300.0, gt=0)
    """Seconds that importing one plugin may take. Raise it where libraries come from a slow disk."""
    hooks: tuple[Annotated[HookConfig, Component("hooks")], ...] = ()
    """Hook plugins to enable, in call order: each a name, or a mapping with ``name`` and its options."""
    report_sections: tuple[Annotated[ReportSectionConfig, Component("report_sections")], ...] = ()
    """Sections that plugins add to ``report.html``, in order: each a name, or a mapping with ``name`` and its
    options."""
    build_timeout_s: float = Field(3600.0, gt=0)
    """Seconds that building one part (a dataset, an environment, a logger, a model) may take. Raise it for large
    downloads."""
    hook_timeout_s: float = Field(600.0, gt=0)
    """Seconds that one call of a hook or a logger may take; then it is treated as one that raised."""

    def policy(self) -> PluginPolicy:
        return PluginPolicy(self.allow, self.block, self.prefer, import_timeout_s=self.import_timeout_s)

    @model_validator(mode="before")
    @classmethod
    def _under_its_own_policy(cls, data: Any, info: ValidationInfo) -> Any:
        """Configs built in Python look hooks and sections up among the plugins that their policy admits, too."""
        if info.context is not None or not isinstance(data, dict) or not (data.keys() & {"hooks", "report_sections"}):
            return data
        read = cls.model_validate(data, context={PLUGINS: registry().restricted(policy_in({"plugins": data}))})
        return {name: getattr(read, name) for name in read.model_fields_set}

    def problems(self) -> Iterator[ConfigIssue]:
        yield from super().problems()
        yield from self._preference_problems()
        for position, hook in enumerate(self.hooks):
            if type(hook) in map(type, self.hooks[:position]):
                message = f"hook {registry().name_of('hooks', type(hook))!r} is listed twice"
                yield ConfigIssue(f"hooks.{position}", message, "list it once")
        installed = {normalize(entry.distribution) for entry in registry().index.entries}
        for key in ("allow", "block"):
            for position, name in enumerate(getattr(self, key) or ()):
                if not DISTRIBUTION.fullmatch(name):
                    fix = "write the name that pip knows, e.g. acme-math"
                    yield ConfigIssue(f"{key}.{position}", f"{shown(name)} is no name of a distribution", fix)
                    continue
                # A list may name what is not installed here; one letter off, it would silently not do its work.
                guess = did_you_mean(normalize(name), installed, likeness=TYPO_LIKENESS)
                if normalize(name) not in installed and guess:
                    yield ConfigIssue(f"{key}.{position}", f"no distribution {name!r} is installed", guess)

    def _preference_problems(self) -> Iterator[ConfigIssue]:
        """A preference must name a plugin and a distribution that provides it: any other would decide nothing."""
        entries = registry().index.entries
        for key, distribution in self.prefer.items():
            kind, _, name = key.partition(".")
            providers = {normalize(e.distribution): e.distribution for e in entries if f"{e.kind}.{e.name}" == key}
            if kind not in KINDS or not name:
                guess = did_you_mean(key, {f"{e.kind}.{e.name}" for e in entries})
                message = f"{shown(key)} is not kind.name"
                yield ConfigIssue(f"prefer.{key}", message, guess or "write e.g. environments.math: acme-math")
            elif not providers:
                guess = did_you_mean(key, {f"{e.kind}.{e.name}" for e in entries})
                yield ConfigIssue(f"prefer.{key}", f"no installed distribution provides {key}", guess or "remove it")
            elif normalize(distribution) not in providers:
                message = f"{shown(distribution)} does not provide {key}"
                yield ConfigIssue(f"prefer.{key}", message, f"name one of {', '.join(sorted(providers.values()))}")


def policy_of(plugins: Any) -> PluginPolicy:
    """The policy of what is written under ``plugins:``. It is needed to look plugins up, so none is looked up here.

    Raises:
        ValidationError: a key of the policy is wrong.
    """
    if isinstance(plugins, Mapping):
        plugins = {key: plugins[key] for key in POLICY if key in plugins}
    return PluginsConfig.model_validate(plugins).policy()


def policy_in(data: Mapping[str, Any]) -> PluginPolicy:
    """The plugin policy of a config that is still to be read.

    Where it is wrong, that is reported with the rest, and meanwhile it admits the well-known distributions alone: it
    was meant to forbid others.
    """
    plugins = data.get("plugins") or {}
    try:
        policy = policy_of(plugins)
    except ValidationError:
        policy = None
    if policy is None or set(dict(plugins)) - set(PluginsConfig.model_fields):
        return PluginPolicy(tuple(STANDARD_PLUGINS.values()), source="the config (its `plugins:` cannot be used)")
    return policy
