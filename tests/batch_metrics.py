"""Metrics of a step without those that depend on the clock."""

from __future__ import annotations

from nemorl.metrics import Metric, Metrics


def of_the_batch(metrics: Metrics) -> dict[str, Metric]:
    """What is the same whenever the same step is made."""
    return {name: metric for name, metric in metrics.items() if not name.startswith("performance/")}
