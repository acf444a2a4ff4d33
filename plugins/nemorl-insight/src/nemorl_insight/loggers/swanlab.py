"""SwanLab."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import swanlab

from nemorl_insight.loggers.config import SwanLabConfig
from nemorl_insight.loggers.run_files import recorded_config, save_id, saved_id


class SwanLabLogger:
    """One SwanLab run per run directory; resuming the directory continues the run where the service keeps it."""

    def __init__(self, config: SwanLabConfig, run_dir: Path) -> None:
        run_id = saved_id(run_dir, "swanlab")
        self._run: Any = swanlab.init(
            project=config.project,
            workspace=config.workspace,
            name=config.run_name or run_dir.resolve().name,
            tags=list(config.tags),
            mode=config.mode,
            log_dir=str(run_dir / "swanlab"),
            id=run_id,
            resume="allow" if run_id else None,
            config=recorded_config(run_dir),
        )
        save_id(run_dir, "swanlab", self._run.id)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        run, self._run = self._run, None
        if run is not None:
            run.finish()
