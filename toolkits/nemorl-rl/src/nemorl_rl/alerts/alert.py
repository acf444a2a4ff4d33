"""An alert, and the loggers that take one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol, runtime_checkable

from nemorl_rl.alerts.rules import Action, Rule, Severity

EVENT, OVER = "alert", "alert_over"
"""Events of ``events.jsonl``."""


@dataclass(frozen=True)
class Alert:
    """A rule whose condition has held for its patience.

    Example:
        >>> rule = Rule(metric="train/moves", above=30, meaning="Games get long.")
        >>> Alert.of("long", rule, "train/moves", step=12, value=34.0, record={}).text
        'train/moves is 34 at step 12: above 30. Games get long.'
    """

    rule: str
    metric: str
    step: int
    value: float
    severity: Severity
    text: str
    """The event, its meaning, the remedy, and what the run does of itself."""
    limit: str = ""
    """The limit that the value crossed, in words."""
    action: Action = "warn"
    """The run's own action."""

    @classmethod
    def of(cls, name: str, rule: Rule, metric: str, step: int, value: float, record: Mapping[str, Any]) -> Alert:
        text = rule.text(rule.finding(metric, step, value, record))
        return cls(name, metric, step, value, rule.severity, text, rule.condition, rule.action)

    @property
    def facts(self) -> dict[str, Any]:
        """As events have it."""
        return asdict(self)


@runtime_checkable
class AlertLogger(Protocol):
    """A logger whose service has alerts: the run's are sent to it.

    Example:
        >>> class Pager:
        ...     def log(self, metrics, step): pass
        ...     def alert(self, alert): page(alert.severity, alert.text)
        ...     def close(self): pass
    """

    def alert(self, alert: Alert) -> None:
        """One that was raised."""
        ...
