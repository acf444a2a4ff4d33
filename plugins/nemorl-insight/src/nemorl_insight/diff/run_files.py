"""Files of a run that can be compared step by step."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from nemorl.base.files.jsonl import read_jsonl
from nemorl.errors import UsageError
from nemorl_cli.report.records.reading import steps_of
from nemorl_cli.report.run_data import RunData, is_number

CHECKPOINT = re.compile(r"step_(\d{6,})")


@dataclass(frozen=True)
class RunFiles:
    """The directory of a run."""

    path: Path

    @classmethod
    def of(cls, path: Path) -> RunFiles:
        """
        Raises:
            UsageError: it is no run directory.
        """
        if not (path / "config.yaml").is_file():
            raise UsageError(f"{path} is not a run directory (no config.yaml)", fix="give the path of a run")
        return cls(path)

    @cached_property
    def data(self) -> RunData:
        return RunData.load(self.path)

    @cached_property
    def metrics(self) -> Mapping[int, Mapping[str, float | None]]:
        """Step -> metric -> value; ``None`` for one that was not finite."""
        found: dict[int, dict[str, float | None]] = {}
        for line in read_jsonl(self.path / "metrics.jsonl"):
            step = line.get("step")
            if isinstance(step, int):
                found.setdefault(step, {}).update(
                    (name, None if value is None else float(value))
                    for name, value in line.items()
                    if name not in ("step", "time") and (value is None or is_number(value))
                )
        return found

    @cached_property
    def checkpoints(self) -> Mapping[int, Path]:
        """Step -> folder, of those that have a manifest."""
        found = {}
        for folder in (self.path / "checkpoints").glob("step_*"):
            match = CHECKPOINT.fullmatch(folder.name)
            if match and (folder / "manifest.json").is_file():
                found[int(match[1])] = folder
        return found

    @cached_property
    def record_steps(self) -> frozenset[int]:
        return frozenset(steps_of(self.path, "train"))

    @property
    def samples(self) -> bool:
        """It trains on responses of its policy, which may have been recorded. True where its config cannot be read."""
        config = self.data.config
        return not config or bool(config.get("generation"))

    @property
    def last_step(self) -> int:
        return max((*self.metrics, *self.checkpoints, *self.record_steps), default=0)
