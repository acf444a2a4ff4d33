"""The hook ``alerts`` of a run that is told of its steps by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from nemorl.config.load import validate
from nemorl.types import Sample, Samples
from nemorl_rl.alerts.config import AlertsConfig
from nemorl_rl.alerts.hook import Alerts
from nemorl_rl.config import RolloutRunConfig


class WatchedRun:
    """Its events, and what ends it."""

    def __init__(self, config: RolloutRunConfig) -> None:
        self.events: list[dict[str, Any]] = []
        directory = SimpleNamespace(metrics=SimpleNamespace(path=Path("nowhere")), logs=[], event=self._event)
        run = SimpleNamespace(console=SimpleNamespace(message=lambda _: None), loggers=(), held_out=None)
        self._trainer = SimpleNamespace(config=config, directory=directory, run=run)
        self._alerts = Alerts(AlertsConfig())
        self._alerts.on_build_end(self._trainer)

    @classmethod
    def of(cls, **settings: Any) -> WatchedRun:
        return cls(validate(RolloutRunConfig, {"model": "some/model", **settings}))

    def _event(self, name: str, **facts: Any) -> None:
        self.events.append({"event": name, **facts})

    @property
    def told(self) -> list[str]:
        return [event["text"] for event in self.events if event["event"] == "alert"]

    def rollout(self, step: int, samples: Sequence[Sample]) -> None:
        self._alerts.on_rollout_end(self._trainer, step, Samples(samples))

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """A step's record, under the names without ``train/``."""
        self._alerts.on_log(self._trainer, step, {f"train/{name}": value for name, value in metrics.items()})
        self._alerts.on_step_end(self._trainer, step)
