"""A Grafana dashboard as plain data, made of what metrics declare: titles, units, meanings and what to watch for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Any

from nemorl.metrics import MetricInfo

from nemorl_ops.prometheus.names import Family

SCHEMA = 39
"""Version of Grafana's dashboard model that this is written in; later ones read it."""
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
UNITS = {"seconds": "s", "GiB": "bytes", "bytes": "bytes", "share": "percentunit", "percent": "percentunit",
         "percent of all cores": "percentunit", "tokens per second": "short"}  # fmt: skip
"""Grafana's names of the units that values have once they are scaled."""
ROWS = {"train": "Learning", "validation": "Validation", "performance": "Speed", "timing": "Time", "system": "Machines"}
"""Rows by the first part of a metric's name, in order."""
WIDTH, HEIGHT, COLUMNS = 8, 7, 24


def dashboard(declared: Mapping[str, MetricInfo], title: str = "nemorl") -> dict[str, Any]:
    """A dashboard of these metrics, one panel for those that share a title and unit.

    Args:
        declared: By full name or pattern.
        title: Of the dashboard.

    Returns:
        What Grafana imports as JSON.
    """
    panels = list(_placed(_rows(declared)))
    return {
        "title": title,
        "uid": "nemorl",
        "schemaVersion": SCHEMA,
        "tags": ["nemorl"],
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {"list": list(_variables())},
        "annotations": {"list": [_alerts()]},
        "panels": [{"id": number, **panel} for number, panel in enumerate(panels, start=1)],
    }


def _variables() -> Iterator[dict[str, Any]]:
    yield {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"}
    for name, query in (("algorithm", "label_values(nemorl_step, algorithm)"),
                        ("run", 'label_values(nemorl_step{algorithm=~"$algorithm"}, run)')):  # fmt: skip
        yield {
            "name": name,
            "type": "query",
            "datasource": SOURCE,
            "query": query,
            "refresh": 2,
            "multi": True,
            "includeAll": True,
            "current": {"text": ["All"], "value": ["$__all"]},
        }


def _alerts() -> dict[str, Any]:
    return {
        "name": "Alerts",
        "datasource": SOURCE,
        "enable": True,
        "iconColor": "red",
        "expr": 'increase(nemorl_alerts_total{run=~"$run"}[2m]) > 0',
        "titleFormat": "{{rule}}",
        "textFormat": "{{run}}",
    }


def _rows(declared: Mapping[str, MetricInfo]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Titles of rows, and their panels without their places."""
    yield "Now", [_stat("Steps", "nemorl_step"), _stat("Alerts raised", "sum by (run) (nemorl_alerts_total)")]
    order = list(ROWS)
    known = {name: info for name, info in declared.items() if name.partition("/")[0] in ROWS}
    ranked = sorted(known, key=lambda name: order.index(name.partition("/")[0]))  # stable: as declared within a row
    for kind, names in groupby(ranked, key=lambda name: name.partition("/")[0]):
        groups: dict[tuple[str, str], list[str]] = {}
        for name in names:
            info = known[name]
            groups.setdefault((info.title or name, info.unit), []).append(name)
        yield (
            ROWS[kind],
            [_panel(title, unit, {name: known[name] for name in of}) for (title, unit), of in groups.items()],
        )


def _panel(title: str, unit: str, metrics: Mapping[str, MetricInfo]) -> dict[str, Any]:
    targets = []
    for number, (name, info) in enumerate(metrics.items()):
        family = Family.of(name, info)
        said = [
            "{{run}}",
            *([name.rpartition("/")[2]] if len(metrics) > 1 else ()),
            *(f"{{{{{x}}}}}" for x in family.labels),
        ]
        query = f'{family.name}{{run=~"$run", algorithm=~"$algorithm"}}'
        targets.append(_target(number, query, " ".join(said)))
    about = {
        part: None
        for info in metrics.values()
        for part in (info.meaning, info.watch_for and f"**Watch for:** {info.watch_for}")
    }
    field: dict[str, Any] = {"unit": UNITS.get(unit, "short"), "custom": {"fillOpacity": 0, "spanNulls": True}}
    return {
        "type": "timeseries",
        "title": title if unit in UNITS or not unit else f"{title} ({unit})",
        "description": "\n\n".join(filter(None, about)),
        "datasource": SOURCE,
        "targets": targets,
        "fieldConfig": {"defaults": field, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []}},
    }


def _stat(title: str, query: str) -> dict[str, Any]:
    chosen = '{run=~"$run"}'
    expression = query[:-1] + chosen + ")" if query.endswith(")") else query + chosen
    return {
        "type": "stat",
        "title": title,
        "datasource": SOURCE,
        "targets": [_target(0, expression, "{{run}}")],
        "fieldConfig": {"defaults": {"unit": "short"}, "overrides": []},
    }


def _target(number: int, query: str, legend: str) -> dict[str, Any]:
    return {"refId": f"Q{number}", "datasource": SOURCE, "expr": query, "legendFormat": legend}


def _placed(rows: Iterator[tuple[str, list[dict[str, Any]]]]) -> Iterator[dict[str, Any]]:
    """Panels with their places on the grid, each row under its title."""
    top = 0
    for title, panels in rows:
        yield {
            "type": "row",
            "title": title,
            "collapsed": False,
            "panels": [],
            "gridPos": {"x": 0, "y": top, "w": COLUMNS, "h": 1},
        }
        top += 1
        for number, panel in enumerate(panels):
            line, column = divmod(number, COLUMNS // WIDTH)
            yield {**panel, "gridPos": {"x": column * WIDTH, "y": top + line * HEIGHT, "w": WIDTH, "h": HEIGHT}}
        top += -(-len(panels) // (COLUMNS // WIDTH)) * HEIGHT
