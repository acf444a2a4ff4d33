"""The hook ``alerts``: takes every record of metrics, raises alerts, and does what their rules ask for.

What the rules have seen is not saved: a run that resumes reads it from ``metrics.jsonl`` again, which is cut where the
run goes back. So it raises the same alerts at the same steps as one that was never interrupted; but for rules on what
is judged and not logged (``rollout_rules``), which begin anew.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from nemorl.base.files.jsonl import read_jsonl
from nemorl.contracts import RateScalingBackend
from nemorl.errors import NemorlError, boundary
from nemorl.metrics import is_called
from nemorl.plugins.hooks import hookimpl
from nemorl.types import Samples

from nemorl_rl.alerts.alert import EVENT, OVER, Alert, AlertLogger
from nemorl_rl.alerts.conditions import Watch
from nemorl_rl.alerts.config import AlertsConfig, rules_of
from nemorl_rl.alerts.rollout_rules import rollout_record
from nemorl_rl.alerts.rules import Rule
from nemorl_rl.callbacks import is_validated, save_beside


class Watching:
    """Rules over the records of a run."""

    def __init__(self, rules: Mapping[str, Rule]) -> None:
        self._rules = rules
        self._watches: dict[tuple[str, str], Watch] = {}
        self._fits = cache(is_called)

    def take(self, metrics: Mapping[str, Any], step: int) -> Iterator[tuple[Alert, bool]]:
        """Alerts that the next record raises (True), and those that it ends (False).

        Args:
            metrics: By full name. ``None``, which is how JSON has NaN, is not a finite number; text is none at all.
            step: Of the record.
        """
        numbers = {name: value for name, value in metrics.items() if isinstance(value, int | float | None)}
        for name, rule in self._rules.items():
            pattern = rule.metric
            found = [m for m in numbers if self._fits(m, pattern)] if "<" in pattern else [pattern]
            for metric in found:
                if metric not in numbers or (numbers.get(rule.unless) or 0) > 0:
                    continue
                number = numbers[metric]
                value = math.nan if number is None else float(number)
                watch = self._watches.setdefault((name, metric), Watch(rule))
                change = watch.take(value)
                if change is not None:
                    yield Alert.of(name, rule, metric, step, value, metrics), change == "raised"

    def restart(self) -> None:
        """The run begins, or goes on: rules on its start are judged again."""
        self._watches = {key: watch for key, watch in self._watches.items() if not self._rules[key[0]].at_start}


class Alerts:
    """One run's alerts."""

    essential = True  # what an action does must happen in every continuation alike, or the run must say why not

    def __init__(self, config: AlertsConfig) -> None:
        self._config = config
        self._rules: Mapping[str, Rule] = {}
        self._watching = Watching({})
        self._saves = False
        self._error: NemorlError | None = None
        self._metrics: Path
        """The file that is read again when the run goes back."""
        self.path: Path
        """As a log of the run, which is told when it goes back. Nothing is written there."""

    def on_build_end(self, trainer: Any) -> None:
        self._rules = rules_of(self._config, trainer.config)
        self._watching, self._saves = Watching(self._rules), False
        self._metrics = trainer.directory.metrics.path
        self.path = self._metrics.with_name(".alerts")
        trainer.directory.logs.append(self)

    def flush(self) -> None:
        """There is nothing to wait for."""

    def truncate_after(self, step: int) -> None:
        """Forget what was seen, and see what ``metrics.jsonl`` holds now."""
        self._watching = Watching(self._rules)
        for record in read_jsonl(self._metrics):
            for _ in self._watching.take(record, int(record.get("step", 0))):
                pass  # told at the time
        self._watching.restart()

    def on_rollout_end(self, trainer: Any, step: int, samples: Samples) -> None:
        self._take(trainer, step, rollout_record(samples, trainer.config.rollouts.breaker.failed_frac))
        self._end()  # before anything is learnt from these samples

    @hookimpl(trylast=True)  # with what other hooks add
    def on_log(self, trainer: Any, step: int, metrics: dict[str, float]) -> None:
        self._take(trainer, step, metrics)

    def on_step_end(self, trainer: Any, step: int) -> None:
        self._end()  # now that the record is written
        if self._saves and not is_validated(trainer, step):
            self._save(trainer, step)

    def on_validation_end(self, trainer: Any, step: int) -> None:
        self._end()
        if self._saves:
            self._save(trainer, step)

    def _take(self, trainer: Any, step: int, record: Mapping[str, Any]) -> None:
        for alert, is_raised in self._watching.take(record, step):
            if is_raised:
                self._raise(alert, trainer, record)
            else:
                trainer.directory.event(OVER, rule=alert.rule, metric=alert.metric, step=step)
            if self._error is not None:
                return  # what ends the run says enough

    def _end(self) -> None:
        if self._error is not None:
            raise self._error

    def _raise(self, alert: Alert, trainer: Any, record: Mapping[str, Any]) -> None:
        rule = self._rules[alert.rule]
        trainer.run.console.message(f"alert {alert.rule}: {alert.text}")
        trainer.directory.event(EVENT, **alert.facts)
        for logger in trainer.run.loggers:
            if isinstance(logger, AlertLogger):
                with boundary(f"logger {type(logger).__name__}"):
                    logger.alert(alert)
        match rule.action:
            case "stop":
                trainer.stop(f"alert {alert.rule}: {alert.text}")
            case "fail":
                self._error = rule.error(rule.finding(alert.metric, alert.step, alert.value, record))
            case "lower_rate":
                trainer.run.policy.workers.call(RateScalingBackend.scale_rate, rule.rate_factor)
            case "save":
                self._saves = True

    def _save(self, trainer: Any, step: int) -> None:
        self._saves = False
        save_beside(trainer, step)
