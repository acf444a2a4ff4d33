"""The plugins of this toolkit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from nemorl.metrics import MetricInfo
from nemorl.plugins.kinds import HookConfig
from pydantic import Field

from nemorl_cli.report.efficiency.declared_metrics import EFFICIENCY_METRICS


class RecordsConfig(HookConfig):
    """Files of every run beside the kernel's own. Part of every run, listed or not."""

    summary: ClassVar[str] = "environment.json, plugins.lock.json and report.html of every run"

    def build(self) -> object:
        from nemorl_cli.report.report import Records

        return Records()


class AuditConfig(HookConfig):
    """Entries of every run in the audit log of its user. Part of every run, listed or not."""

    summary: ClassVar[str] = "entries of every run in a log that shows when somebody changes it"

    def build(self) -> object:
        from nemorl_trust.audit.hook import Audit

        return Audit()


class EfficiencyConfig(HookConfig):
    """Speed per device and phase, waste, and what the machines do, in every run. Part of every run, listed or not."""

    summary: ClassVar[str] = "speed per device and phase, waste, and CPU, memory and GPUs of every node"
    metrics: ClassVar[Mapping[str, MetricInfo]] = EFFICIENCY_METRICS

    enabled: bool = True
    """False: none of its metrics, no line at the end, nothing is sampled."""
    sample_every_s: float = Field(10.0, ge=0, le=86_400)
    """Seconds between two readings of each node's CPU, memory and GPUs; 0: none."""

    def build(self) -> object:
        from nemorl_cli.report.efficiency.hook import Disabled, Efficiency

        return Efficiency(self.sample_every_s) if self.enabled else Disabled()
