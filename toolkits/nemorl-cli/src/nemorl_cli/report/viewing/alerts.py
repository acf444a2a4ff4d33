"""The alerts of a run as its page shows them: a list, and marks on the curves that they are about."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from nemorl_rl.alerts.alert import EVENT, OVER

from nemorl_cli.report.run_data import RunData, is_number

MOST = 100
"""Alerts of a page: the last ones."""
Shown = dict[str, Any]


def alerts_of(run: RunData) -> list[Shown]:
    """Alerts in the order of their steps: rule, metric, value, limit, severity, action, advice, and the step at which
    it was over (``until``; ``None``: not yet). One that was raised again when the run went back is there once."""
    found: dict[tuple[str, str, int], Shown] = {}
    for event in run.events:
        rule, metric, step = str(event.get("rule")), str(event.get("metric")), event.get("step")
        if not isinstance(step, int):
            continue
        if event.get("event") == EVENT:
            found[rule, metric, step] = _shown(event, rule, metric, step)
        elif event.get("event") == OVER:
            for key, alert in found.items():
                if key[:2] == (rule, metric) and alert["until"] is None and key[2] <= step:
                    alert["until"] = step
    return sorted(found.values(), key=lambda alert: int(alert["step"]))[-MOST:]


def _shown(event: Any, rule: str, metric: str, step: int) -> Shown:
    value, limit, text = event.get("value"), str(event.get("limit") or ""), str(event.get("text") or "")
    return {
        "rule": rule,
        "metric": metric,
        "step": step,
        "value": value if is_number(value) else None,
        "limit": limit,
        "severity": str(event.get("severity") or "warning"),
        "action": str(event.get("action") or "warn"),
        "advice": (limit and text.partition(f": {limit}. ")[2]) or text,
        "until": None,
    }


def mark(cards: Iterable[dict[str, Any]], alerts: Sequence[Shown]) -> None:
    """Give each chart the alerts on the metrics that it draws."""
    for card in cards:
        drawn = {line.get("metric") for line in card["series"]}
        card["alerts"] = [alert for alert in alerts if alert["metric"] in drawn]
