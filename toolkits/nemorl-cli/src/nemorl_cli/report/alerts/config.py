"""The hook ``alerts`` and its options."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from nemorl.base.text.reading import shown
from nemorl.base.text.suggest import did_you_mean
from nemorl.config.base import Config
from nemorl.errors import ConfigIssue
from nemorl.plugins.kinds import HookConfig
from pydantic import Field

from nemorl_cli.report.alerts.builtin import BUILTIN
from nemorl_cli.report.alerts.rules import BringsAlerts, Rule


class AlertsConfig(HookConfig):
    """Rules on metrics that say when a run goes wrong. Part of every run, listed or not."""

    summary: ClassVar[str] = "says when the reward collapses, the entropy is gone, numbers are not finite, …"

    enabled: bool = True
    """False: no rule is watched."""
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
                yield from _mistakes(name, rule)

    def build(self) -> object:
        from nemorl_cli.report.alerts.hook import Alerts, NoAlerts

        return Alerts(self) if self.enabled else NoAlerts()


def rules_of(alerts: AlertsConfig, run: Config) -> dict[str, Rule]:
    """All rules of a run by name: nemorl's own, those of its plugins, and those of its config."""
    found = {**BUILTIN, **brought(run)}
    for name, rule in alerts.rules.items():
        found[name] = rule.over(found[name]) if name in found else rule
    return {name: rule for name, rule in found.items() if name not in alerts.without}


def rule_problems(alerts: AlertsConfig, run: Config) -> Iterator[ConfigIssue]:
    """Names and rules that no run of this config could use. Paths begin at the hook."""
    known = {**BUILTIN, **brought(run)}
    for position, name in enumerate(alerts.without):
        if name not in known:
            guess = did_you_mean(name, known) or f"the rules are {', '.join(sorted(known))}"
            yield ConfigIssue(f"without.{position}", f"no rule is called {shown(name)}", guess)
    for name, rule in alerts.rules.items():
        if name in known:
            yield from _mistakes(name, rule.over(known[name]))
        elif not rule.metric and did_you_mean(name, known):
            yield ConfigIssue(f"rules.{name}", f"no rule is called {shown(name)}", did_you_mean(name, known))
        else:
            yield from _mistakes(name, rule)


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


def _mistakes(name: str, rule: Rule) -> Iterator[ConfigIssue]:
    problem = rule.mistake()
    if problem is not None:
        path = ".".join(filter(None, ("rules", name, problem.path)))
        yield ConfigIssue(path, problem.message, problem.fix)
