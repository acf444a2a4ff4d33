"""Report sections with a mistake each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from nemorl.plugins.kinds import ReportSectionConfig
from nemorl_cli.report.run_data import RunData
from nemorl_cli.report.sections import Curves, Section, Table, Text

REWARD = "train/reward"


class AnySection(ReportSectionConfig):
    """Shows what ``mistake`` says."""

    summary: ClassVar[str] = "a report section with a mistake"

    mistake: str = "good"
    """Name of the function that it builds."""

    def build(self) -> Callable[[RunData], Any]:
        return MISTAKES[self.mistake]


class TwinSection(AnySection):
    """Installed under one name by two distributions."""


def good(run: RunData) -> Section | None:
    """The rewards of the run."""
    rewards = run.metrics.get(REWARD)
    if not rewards:
        return None
    rows = [(str(step), reward) for step, reward in rewards.items()]
    return Section("Rewards", [Text("By step."), Table(("step", "reward"), rows), Curves("Reward", {"": rewards})])


def gives_text(run: RunData) -> Any:
    """HTML of its own."""
    return f"<p>{run.name}</p>"


def expects_rewards(run: RunData) -> Section:
    """Takes every run for one with rewards."""
    return Section("Rewards", [Text(f"{max(run.metrics[REWARD].values())} at best")])


def takes_out(run: RunData) -> Section | None:
    """Nobody after it sees the first reward."""
    section = good(run)
    if section is not None:
        run.metrics[REWARD].pop(1)
    return section


def short_rows(run: RunData) -> Section:
    """Two columns, one cell."""
    return Section("Rewards", [Table(("step", "reward"), [(str(step),) for step in run.metrics.get(REWARD, {})])])


def curve_without_steps(run: RunData) -> Section:
    """Values in a list."""
    return Section("Rewards", [Curves("Reward", {"reward": list(run.metrics.get(REWARD, {}).values())})])  # type: ignore[dict-item]


MISTAKES: dict[str, Callable[[RunData], Any]] = {
    section.__name__: section
    for section in (good, gives_text, expects_rewards, takes_out, short_rows, curve_without_steps)
}
