"""A run's metrics for Prometheus, and a Grafana dashboard of them."""

from nemorl_ops.prometheus.config import PrometheusConfig

__all__ = ["PrometheusConfig"]
