"""Metrics that know how they reduce, so that microbatches, ranks and minibatches merge exactly.

For authors of plugins; they are defined in :mod:`nemorl_base.metrics`, which says why.
"""

from nemorl_base.metric_info import MetricInfo
from nemorl_base.metrics import Histogram, Last, Max, Mean, Metric, Metrics, Min, Sum, average, merge, values

__all__ = [
    "Histogram",
    "Last",
    "Max",
    "Mean",
    "Metric",
    "MetricInfo",
    "Metrics",
    "Min",
    "Sum",
    "average",
    "merge",
    "values",
]
