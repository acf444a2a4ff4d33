"""The launch check of alerts: rules and metrics that no run of this config could have."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from nemorl.config.run import declared_metrics
from nemorl.errors import ConfigIssue
from nemorl.metrics import metric_problem

from nemorl_cli.report.alerts.builtin import BUILTIN
from nemorl_cli.report.alerts.config import AlertsConfig, rule_problems, rules_of
from nemorl_cli.report.efficiency.declared_metrics import EFFICIENCY_METRICS

if TYPE_CHECKING:
    from nemorl.config.run import RunConfig

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
    known = {**declared_metrics(config), **EFFICIENCY_METRICS}
    others = any(not isinstance(hook, AlertsConfig) for hook in config.plugins.hooks)
    for name, rule in rules_of(alerts, config).items():
        asked = rule.metric if name not in BUILTIN or rule.metric != BUILTIN[name].metric else ""
        found = metric_problem(asked, known, validates=validates, has_hooks=others) if asked else None
        if found is not None and name in alerts.rules:
            yield ConfigIssue(f"rules.{name}.metric", *found)
        if rule.action == "lower_rate" and CAPABILITY not in config.policy.backend.supports:
            kind = type(config.policy.backend).__name__.removesuffix("Config")
            fix = "choose another action, or a backend with the capability rate_scale"
            yield ConfigIssue(f"rules.{name}.action", f"{kind} cannot change the learning rate of a run", fix)
