"""The report section ``plan``: predicted beside measured seconds. Importing this module does not import the planner."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from nemorl.errors import ConfigError, UsageError
from nemorl.plugins.kinds import ReportSectionConfig
from nemorl_cli.report.run_data import RunData
from nemorl_cli.report.sections import Section, Table, Text

SAID = (
    "Seconds of a step as nemorl plan counts them for {nodes} x {per_node} {device}, and the median of the run's "
    "steps. Rewards are not counted, nor what small models spend between their products. nemorl plan CONFIG --from RUN "
    "plans with what was measured."
)


@dataclass(frozen=True)
class PlanSection:
    """Builds the section of a run."""

    gpus: str | None

    def __call__(self, run: RunData) -> Section | None:
        if self.gpus is None and not _was_here(run):
            return None
        try:
            from nemorl_insight.plan.measured import compared

            found = compared(run, fleet_from=(None, self.gpus, None))
        except (UsageError, ConfigError) as error:
            if self.gpus is None:  # nobody asked: it made no step, or its model is not known here
                return None
            return Section("Predicted and measured", [Text(f"The run could not be planned: {error}")])
        columns = ["phase", "predicted, s", "measured, s", "measured / predicted"]
        rows = [(name.replace("_", " "), planned, taken, ratio) for name, planned, taken, ratio in found.rows()]
        fleet = found.fleet
        said = SAID.format(nodes=fleet.nodes, per_node=fleet.per_node, device=fleet.device.name)
        return Section("Predicted and measured", [Text(said), Table(columns, rows)])


def _was_here(run: RunData) -> bool:
    """The run had a machine like this one, as far as it says: the plan of another's devices would be about nothing."""
    found = run.environment
    return (found.get("platform"), found.get("cpus")) == (platform.platform(), os.cpu_count())


class PlanSectionConfig(ReportSectionConfig):
    """Predicted beside measured seconds of a step."""

    summary: ClassVar[str] = "Predicted beside measured: seconds of a step by phase (`nemorl plan --from`)"

    unasked: ClassVar[bool] = True
    gpus: str | None = None
    """Devices of each node as ``8xH100``, where the report is written on another machine than the run's. If they are
    given, a run that cannot be planned says why; otherwise there is no section."""

    def build(self) -> Callable[[Any], Any]:
        return PlanSection(self.gpus)
