"""The options. Nothing heavy is imported here: listing and checking configs must work without it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from nemorl.config import FileName
from nemorl.plugins.kinds import LoggerConfig
from pydantic import Field

if TYPE_CHECKING:
    from nemorl.contracts import Logger


class ExampleConfig(LoggerConfig):
    """Metrics as a CSV file in the run directory."""

    summary: ClassVar[str] = "metrics as a CSV file: step, name, value"

    file: FileName = Field("metrics.csv", pattern=r"^[^/\\]+$")
    """Its name."""

    def build(self, run_dir: Path) -> Logger:
        from nemorl_example.logger import ExampleLogger

        return ExampleLogger(run_dir / self.file)
