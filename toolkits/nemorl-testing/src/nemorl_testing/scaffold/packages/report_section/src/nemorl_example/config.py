"""The options. Nothing heavy is imported here: listing and checking configs must work without it."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from nemorl.plugins.kinds import ReportSectionConfig
from pydantic import Field

if TYPE_CHECKING:
    from nemorl_cli.report.sections import SectionSource


class ExampleConfig(ReportSectionConfig):
    """The prompts with the lowest mean reward."""

    summary: ClassVar[str] = "the prompts with the lowest mean reward"

    count: int = Field(10, ge=1)
    """Prompts in the table."""

    def build(self) -> SectionSource:
        from nemorl_example.section import HardestPrompts

        return HardestPrompts(self.count)
