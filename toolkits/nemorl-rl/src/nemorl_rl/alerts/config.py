"""The hook ``alerts``, its options, and their launch check."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from nemorl.base.packages.plugin_policy import HOUSE
from nemorl.base.text.reading import shown
from nemorl.base.text.suggest import did_you_mean
from nemorl.config.base import Config
from nemorl.config.run import RunConfig, declared_metrics
from nemorl.errors import ConfigIssue
from nemorl.metrics import metric_problem
from nemorl.plugins.kinds import HookConfig
from pydantic import Field

from nemorl_rl.alerts.builtin import BUILTIN
from nemorl_rl.alerts.rollout_rules import RolloutRule, rollout_rules
from nemorl_rl.alerts.rules import BringsAlerts, Rule


class AlertsConfig(HookConfig):
    """Rules on metrics that say when a run goes wrong. Part of every run, listed or not."""

    summary: ClassVar[str] = "says when the reward collapses, the entropy is gone, numbers are not finite, …"

    enabled: bool = True
    """False: no rule is watched but those that ``rollouts`` sets."""
    without: tuple[str, ...] = ()
    """Names of rules that are not watched: nemorl's own, or those of plugins."""
    rules: dict[str, Rule] = Field(default_factory=dict)
    """Rules of your own by name, and other settings of those that there are: ``{kl_high: {above: 0.2}}``."""

    def problems(self) -> Iterator[ConfigIssue]:
        yield from super().problems()
        for name, rule in self.rules.items():
            if name in self.without:
                yield ConfigIssue(f"rules.{name}", "it is listed in `without` as well", "remove it from one of the two")
            if len(rule.conditions) > 1:
                yield from _problem(name, rule.mistake())

    def build(self) -> object:
        from nemorl_rl.alerts.hook import Alerts

        return Alerts(self)


def rules_of(alerts: AlertsConfig, run: Config) -> dict[str, Rule]:
    """All rules of a run by name: nemorl's own, those of its plugins, and those of its config."""
    found = _known(run)
    for name, rule in alerts.rules.items():
        found[name] = rule.over(found[name]) if name in found else rule
    watched = {name: rule for name, rule in found.items() if alerts.enabled or isinstance(rule, RolloutRule)}
    return {name: rule for name, rule in watched.items() if name not in alerts.without}


def _known(run: Config) -> dict[str, Rule]:
    return {**BUILTIN, **dict(rollout_rules(run)), **brought(run)}


def rule_problems(alerts: AlertsConfig, run: Config) -> Iterator[ConfigIssue]:
    """Names and rules that no run of this config could use. Paths begin at the hook."""
    known = _known(run)
    for position, name in enumerate(alerts.without):
        if name not in known:
            guess = did_you_mean(name, known) or f"the rules are {', '.join(sorted(known))}"
            yield ConfigIssue(f"without.{position}", f"no rule is called {shown(name)}", guess)
    for name, rule in alerts.rules.items():
        if name in known:
            base = known[name]
            if isinstance(base, RolloutRule) and rule.model_fields_set - {"severity", "action", "rate_factor"}:
                yield ConfigIssue(f"rules.{name}", f"{base.set_by} sets when it holds", f"set {base.set_by}")
            else:
                yield from _problem(name, rule.over(base).mistake())
        elif not rule.metric and did_you_mean(name, known):
            yield ConfigIssue(f"rules.{name}", f"no rule is called {shown(name)}", did_you_mean(name, known))
        else:
            yield from _problem(name, rule.mistake())


def brought(part: object) -> dict[str, Rule]:
    """Rules of the plugins that a config selects."""
    found: dict[str, Rule] = {}
    if isinstance(part, BringsAlerts):
        found.update(part.alert_rules)
    if isinstance(part, Config):
        part = dict(part)
    inner: Any = part.values() if isinstance(part, Mapping) else part if isinstance(part, tuple | list) else ()
    for value in inner:
        found.update(brought(value))
    return found


def _problem(name: str, problem: ConfigIssue | None) -> Iterator[ConfigIssue]:
    if problem is not None:
        path = ".".join(filter(None, ("rules", name, problem.path)))
        yield ConfigIssue(path, problem.message, problem.fix)


CAPABILITY = "rate_scale"
"""Of training backends that can lower their learning rate."""


def check(config: RunConfig, run_dir: Path, warn: Callable[[str], None]) -> Iterator[ConfigIssue]:
    """The launch check: what is written of alerts fits the run."""
    for position, hook in enumerate(config.plugins.hooks):
        if isinstance(hook, AlertsConfig):
            for problem in (*rule_problems(hook, config), *_run_problems(hook, config)):
                yield replace(problem, path=f"plugins.hooks.{position}.{problem.path}")


def _run_problems(alerts: AlertsConfig, config: RunConfig) -> Iterator[ConfigIssue]:
    validates = config.validation.every > 0 or config.validation.at_start or config.validation.at_end
    plugins = config.registry
    own = [entry for entry in plugins.index.of_kind("hooks") if entry.distribution in HOUSE]  # of every run
    known = declared_metrics((config, *(plugins.load("hooks", entry.id)() for entry in own)))
    others = any(not isinstance(hook, AlertsConfig) for hook in config.plugins.hooks)
    for name, rule in rules_of(alerts, config).items():
        asked = rule.metric if name in alerts.rules and "metric" in alerts.rules[name].model_fields_set else ""
        found = metric_problem(asked, known, validates=validates, has_hooks=others) if asked else None
        if found is not None:
            yield ConfigIssue(f"rules.{name}.metric", *found)
        if rule.action == "lower_rate" and CAPABILITY not in config.policy.backend.supports:
            kind = type(config.policy.backend).__name__.removesuffix("Config")
            fix = "choose another action, or a backend with the capability rate_scale"
            yield ConfigIssue(f"rules.{name}.action", f"{kind} cannot change the learning rate of a run", fix)
