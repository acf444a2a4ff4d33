"""Declarations of a run's metrics: its algorithm and its plugins say what they log and how it is shown."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from nemorl.config.load import load_config
from nemorl.config.plugin_lists import PluginsConfig, policy_of
from nemorl.config.run import RunConfig, declared_metrics
from nemorl.errors import NemorlError, boundary
from nemorl.metrics import MetricInfo, is_called
from nemorl.plugins.registry import Registry, registry
from pydantic import ValidationError

from nemorl_cli.report.efficiency.declared_metrics import EFFICIENCY_METRICS
from nemorl_cli.report.run_data import RunData

UNDECLARED = MetricInfo()


def admitted(run: RunData) -> Registry:
    """The plugins that the run allowed itself."""
    try:
        return registry().restricted(policy_of(run.config.get("plugins") or {}))
    except ValidationError:
        return registry().restricted(PluginsConfig(allow=()).policy())  # an unreadable policy admits nobody


@dataclass(frozen=True)
class Declarations:
    """Declarations of a run's metrics: all that is known beside their values."""

    metrics: Mapping[str, MetricInfo] = field(default_factory=dict)
    """By full name or pattern, in the order to show them."""
    best: str = ""
    """The metric that ranks checkpoints; empty if that is not known."""
    best_is_highest: bool = True

    @classmethod
    def of(cls, run: RunData, plugins: Registry) -> Declarations:
        """Those of the run's config; of its algorithm alone where the config no longer loads; else none."""
        with suppress(NemorlError), boundary("metrics of the config"):
            config = load_config(run.config)
            ranked = config.checkpoint
            if ranked.metric is not None:
                return cls(_all_of(declared_metrics(config)), ranked.metric, ranked.higher_is_better)
            return cls(_all_of(declared_metrics(config)), config.best_metric, config.best_is_highest)
        with suppress(NemorlError), boundary("metrics of the algorithm"):
            algorithm: type[RunConfig] = plugins.load("algorithms", run.algorithm)
            return cls(_all_of(algorithm.metrics), algorithm.best_metric, algorithm.best_is_highest)
        return cls()

    def grouped(self, names: list[str]) -> dict[tuple[str, str], dict[str, MetricInfo]]:
        """Metrics by the title and unit that they share, declared ones in the order of their declarations."""
        found: dict[str, MetricInfo] = {}
        exact = [name for name in names if name in self.metrics]
        for declared, info in self.metrics.items():
            if declared in exact:
                found[declared] = info
            elif "<" in declared:
                others = (name for name in names if name not in exact and is_called(name, declared))
                found.update(dict.fromkeys(sorted(others, key=lambda name: (len(name), name)), info))
        groups: dict[tuple[str, str], dict[str, MetricInfo]] = {}
        for name in [*found, *sorted(set(names) - set(found))]:
            info = found.get(name, UNDECLARED)
            groups.setdefault((info.title or name, info.unit), {})[name] = info
        return groups


def _all_of(declared: Mapping[str, MetricInfo]) -> dict[str, MetricInfo]:
    """Those of a run's parts, and of the hook that is part of every run."""
    return {**declared, **EFFICIENCY_METRICS}
