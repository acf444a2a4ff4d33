"""Weights & Biases."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import wandb
from nemorl.base.text.secrets import redacted
from nemorl_rl.alerts.alert import Alert

from nemorl_insight.loggers.config import WandbConfig
from nemorl_insight.loggers.run_files import COLUMNS, NewSamples, recorded_config, save_id, saved_id


class WandbLogger:
    """One wandb run per run directory; resuming the directory resumes the run."""

    def __init__(self, config: WandbConfig, run_dir: Path) -> None:
        run_id, self._run_dir = saved_id(run_dir, "wandb"), run_dir
        self._samples = NewSamples(run_dir, config.samples)
        self._config = recorded_config(run_dir)
        # wandb reads its environment once per process; what counts is how it is now.
        mode: Any = config.mode or os.environ.get("WANDB_MODE")
        self._run: Any = wandb.init(
            project=config.project,
            entity=config.entity,
            name=config.run_name or run_dir.resolve().name,
            tags=list(config.tags),
            mode=mode,
            dir=str(run_dir),
            id=run_id,
            resume="allow" if run_id else None,
            config=self._config,
            settings=_discreet(),
        )
        save_id(run_dir, "wandb", self._run.id)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        if not self._config:  # that of a new run is written after its loggers are built
            self._config = recorded_config(self._run_dir)
            self._run.config.update(self._config)
        self._run.log({**metrics, **self._tables()}, step=step)

    def alert(self, alert: Alert) -> None:
        level = {"info": "INFO", "warning": "WARN", "error": "ERROR"}[alert.severity]
        self._run.alert(title=alert.rule, text=alert.text, level=level)

    def close(self) -> None:
        run = self._run
        if run is None:
            return
        if tables := self._tables():
            run.log(tables)
        self._run = None
        run.finish()

    def _tables(self) -> dict[str, Any]:
        """New samples by split. They are recorded beside the step, so they come a step late and say theirs."""
        found: dict[str, list[list[Any]]] = {}
        for table in self._samples.take():
            found.setdefault(f"samples/{table.split}", []).extend(table.rows)
        return {name: wandb.Table(columns=list(COLUMNS), data=rows) for name, rows in found.items()}


def _discreet() -> Any:
    """Settings by which wandb keeps no copy of what anybody prints, nor of a command line that holds a secret."""
    return wandb.Settings(console="off", x_disable_meta=any(redacted(part) != part for part in sys.argv))
