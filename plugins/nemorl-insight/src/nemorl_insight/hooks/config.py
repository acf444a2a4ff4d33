"""The hooks and their options."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar, Literal

from nemorl.base.text.reading import shown
from nemorl.config import FileName
from nemorl.errors import ConfigIssue
from nemorl.plugins.kinds import HookConfig
from pydantic import Field

TAKEN = frozenset({"metrics.jsonl", "events.jsonl", "config.yaml", "", ".", ".."})
"""Names that are no log's."""


class EarlyStoppingConfig(HookConfig):
    """Ends a run once a validation metric is good enough, or no longer improves."""

    summary: ClassVar[str] = "ends a run whose validation metric is good enough, or no longer improves"

    metric: str = "accuracy"
    """Name as in validation metrics, e.g. ``accuracy`` or ``val_loss``."""
    mode: Literal["max", "min"] = "max"
    """Direction of the metric: ``min`` for losses."""
    patience: int | None = Field(None, ge=1)
    """Stop after this many validations in a row without a new best. Unset: never for this reason."""
    min_delta: float = Field(0.0, ge=0)
    """A new best must be better by more than this."""
    threshold: float | None = None
    """Stop when the metric has reached this. Unset: never for this reason."""

    def problems(self) -> Iterator[ConfigIssue]:
        yield from super().problems()
        if self.patience is None and self.threshold is None:
            yield ConfigIssue("patience", "nothing would stop the run", "set patience, threshold or both")
        if self.metric.startswith("validation/"):
            short = self.metric.removeprefix("validation/")
            yield ConfigIssue("metric", f"{self.metric!r} is its full name", f"write {short!r}")

    def build(self) -> object:
        from nemorl_rl.callbacks import EarlyStopping

        return EarlyStopping(
            self.metric,
            threshold=self.threshold,
            patience=self.patience,
            min_delta=self.min_delta,
            higher_is_better=self.mode == "max",
        )


class LogsConfig(HookConfig):
    """Log records of the run and its events in one file, with the ids of step, worker and episode."""

    summary: ClassVar[str] = "structured logs: JSON lines with run, step, worker and episode"

    format: Literal["json", "text"] = "json"
    """How a record is written: an object per line, or text for people."""
    level: Literal["debug", "info", "warning", "error"] = "info"
    """Least level of nemorl's own records. Of other libraries, warnings and errors."""
    file: FileName = "log.jsonl"
    """File in the run directory; it is added to. Workers under Ray write to their own output."""

    def problems(self) -> Iterator[ConfigIssue]:
        yield from super().problems()
        if Path(self.file).name != self.file or self.file in TAKEN:
            yield ConfigIssue("file", f"{shown(self.file)} is no name for a log", "give a file name, e.g. log.jsonl")

    def build(self) -> object:
        from nemorl_insight.hooks.logs import Logs

        return Logs(self.level, self.format, self.file)
