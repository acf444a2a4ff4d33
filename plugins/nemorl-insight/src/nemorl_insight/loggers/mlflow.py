"""MLflow tracking, through a client of its own: a run that the user has open in this process stays untouched."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlflow
from mlflow.entities import Metric
from nemorl_rl.alerts.alert import Alert

from nemorl_insight.loggers.config import MLflowConfig
from nemorl_insight.loggers.run_files import COLUMNS, NewSamples, save_id, saved_id

FORBIDDEN = re.compile(r"[^\w./: -]")
"""Characters that MLflow refuses in metric names, such as the ``@`` of ``pass@4``."""
MOST_TAG = 5000
"""Longest value of a tag, in characters."""


class MLflowLogger:
    """One MLflow run per run directory; resuming the directory continues the run."""

    def __init__(self, config: MLflowConfig, run_dir: Path) -> None:
        self._client: Any = mlflow.MlflowClient(tracking_uri=config.tracking_uri)
        run_id = saved_id(run_dir, "mlflow")
        if run_id is None:
            experiment = self._client.get_experiment_by_name(config.experiment)
            experiment_id = (
                experiment.experiment_id if experiment else self._client.create_experiment(config.experiment)
            )
            name = config.run_name or run_dir.resolve().name
            run_id = str(self._client.create_run(experiment_id, run_name=name).info.run_id)
            save_id(run_dir, "mlflow", run_id)
        else:
            self._client.update_run(run_id, status="RUNNING")
        self._run_id = run_id
        self._samples = NewSamples(run_dir, config.samples)
        self._is_closed = False

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        now_ms = int(time.time() * 1000)
        batch = [Metric(FORBIDDEN.sub("_", name), value, now_ms, step) for name, value in metrics.items()]
        self._client.log_batch(self._run_id, metrics=batch)
        self._store_tables()

    def alert(self, alert: Alert) -> None:
        self._client.set_tag(self._run_id, f"alert.{alert.rule}", alert.text[:MOST_TAG])

    def _store_tables(self) -> None:
        for table in self._samples.take():
            columns = dict(zip(COLUMNS, map(list, zip(*table.rows, strict=True)), strict=False))
            file = f"samples/{table.split}/step_{table.step:06}.json"
            self._client.log_table(self._run_id, columns, file)

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._store_tables()
            self._client.set_terminated(self._run_id)
