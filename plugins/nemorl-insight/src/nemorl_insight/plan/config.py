"""The report section ``plan``. Importing this module imports neither torch nor the planner."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from nemorl.plugins.kinds import ReportSectionConfig


class PlanSectionConfig(ReportSectionConfig):
    """Predicted beside measured seconds of a step."""

    summary: ClassVar[str] = "Predicted beside measured: seconds of a step by phase (`nemorl plan --from`)"

    unasked: ClassVar[bool] = True
    gpus: str | None = None
    """Devices of each node as ``8xH100``, where the report is written on another machine than the run's. If they are
    given, a run that cannot be planned says why; otherwise there is no section."""

    def build(self) -> Callable[[Any], Any]:
        from nemorl_insight.plan.section import PlanSection

        return PlanSection(self.gpus)
