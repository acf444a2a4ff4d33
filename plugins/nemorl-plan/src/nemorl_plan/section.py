"""A section of the report: what the planner predicted, and what the run took."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from nemorl.errors import ConfigError, UsageError
from nemorl_report.run_data import RunData
from nemorl_report.sections import Section, Table, Text

from nemorl_plan.measured import compared


@dataclass(frozen=True)
class PlanSection:
    """Builds the section of a run."""

    gpus: str | None

    def __call__(self, run: RunData) -> Section | None:
        try:
            found = compared(run, fleet_from=(None, self.gpus, None))
        except (UsageError, ConfigError) as error:
            return Section("Predicted and measured", [Text(f"The run could not be planned: {error}")])
        columns = ["phase", "predicted, s", "measured (median), s", "measured / predicted"]
        shares = [[name.replace("_", " "), value] for name, value in asdict(found.refitted).items()]
        return Section(
            "Predicted and measured",
            [
                Table(columns, [list(row) for row in found.rows()]),
                Text("Shares of the device's peak that would have given the measured times:"),
                Table(["efficiency", "value"], shares),
            ],
        )
