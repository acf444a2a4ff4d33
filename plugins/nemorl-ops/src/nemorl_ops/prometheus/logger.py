"""The endpoint: the newest value of every metric, in Prometheus' text format."""

from __future__ import annotations

import base64
import hmac
import json
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from nemorl.base.files.atomic import replace_text
from nemorl.resources.ports import listening_socket
from nemorl_cli.report.declared import Declarations, admitted
from nemorl_cli.report.run_data import RunData
from nemorl_rl.alerts.alert import Alert
from nemorl_trust.http_server import App, HttpServer
from prometheus_client import CollectorRegistry, make_asgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.process_collector import ProcessCollector

from nemorl_ops.prometheus.config import PrometheusConfig
from nemorl_ops.prometheus.names import Families

TARGETS = "prometheus.json"
"""File of the run directory with the endpoint's address, as Prometheus' ``file_sd_configs`` reads it."""
MOST_CONNECTIONS = 64
ENDING_S = 1
"""A run that ends waits as long for scrapes under way, at most."""


class PrometheusLogger:
    """One endpoint per run. It says nothing of steps before the process began."""

    def __init__(self, config: PrometheusConfig, run_dir: Path) -> None:
        registry = CollectorRegistry()
        self._values = Values(run_dir)
        registry.register(self._values)
        ProcessCollector(registry=registry)
        app = guarded(make_asgi_app(registry), config.token, config.username)
        listening = listening_socket("the endpoint for Prometheus", config.host, config.port, waiting=1024)
        self.port = int(listening.getsockname()[1])
        """The port it listens on."""
        self._server = HttpServer("the endpoint for Prometheus", app, most=MOST_CONNECTIONS, ending_s=ENDING_S)
        self._targets = run_dir / TARGETS
        target = {"targets": [f"{config.host}:{self.port}"], "labels": {"job": "nemorl"}}
        replace_text(self._targets, json.dumps([target]) + "\n")
        self._thread = threading.Thread(target=self._server.run, args=([listening],), name="prometheus", daemon=True)
        self._thread.start()
        self._is_closed = False

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._values.take(metrics, step)

    def alert(self, alert: Alert) -> None:
        self._values.alert(alert)

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._server.should_exit = True
            self._thread.join()
            self._targets.unlink(missing_ok=True)


class Values:
    """The newest values of a run. Scrapes read them from other threads."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._lock = threading.Lock()
        self._newest: dict[str, float] = {}
        self._step, self._time = 0, 0.0
        self._alerts: Counter[tuple[str, str]] = Counter()

    def take(self, metrics: Mapping[str, float], step: int) -> None:
        with self._lock:
            self._newest.update(metrics)
            self._step, self._time = step, time.time()

    def alert(self, alert: Alert) -> None:
        with self._lock:
            self._alerts[alert.rule, alert.severity] += 1

    def describe(self) -> Iterator[Metric]:
        """Nothing in advance: a run logs what it logs. The registry would else collect to find out."""
        yield from ()

    def collect(self) -> Iterator[Metric]:
        """Everything, as families."""
        with self._lock:
            found = list(self._collected()) if self._time else []
        yield from found

    def _collected(self) -> Iterator[Metric]:
        about = {"run": self._run.name, "algorithm": self._run.algorithm}
        yield InfoMetricFamily("nemorl_run", "The run behind this endpoint", {**about, "model": self._run.model})
        names, values = list(about), list(about.values())
        counted = CounterMetricFamily("nemorl_alerts", "Alerts raised by rule", labels=[*names, "rule", "severity"])
        for (rule, severity), count in self._alerts.items():
            counted.add_metric([*values, rule, severity], count)
        yield counted
        for name, text, value in (
            ("nemorl_step", "Steps completed", self._step),
            ("nemorl_last_record_timestamp_seconds", "When metrics were logged, in seconds since 1970", self._time),
        ):
            gauge = GaugeMetricFamily(name, text, labels=names)
            gauge.add_metric(values, value)
            yield gauge
        found: dict[str, GaugeMetricFamily] = {}
        for metric, number in self._newest.items():
            family, labels = self._named.of(metric)
            if family.name not in found:
                found[family.name] = GaugeMetricFamily(family.name, family.help, labels=[*names, *family.labels])
            found[family.name].add_metric([*values, *labels], number * family.scale)
        yield from found.values()

    @cached_property
    def _run(self) -> RunData:
        """Read at the first scrape: a new run's config is written after its loggers are built."""
        return RunData.load(self._run_dir)

    @cached_property
    def _named(self) -> Families:
        return Families(Declarations.of(self._run, admitted(self._run)).metrics)


def guarded(app: App, token: str | None, username: str | None) -> App:
    """``app`` for requests that know the token: as bearer token, or as the password of a name."""
    if token is None:
        return app
    said = f"Bearer {token}"
    if username is not None:
        said = "Basic " + base64.b64encode(f"{username}:{token}".encode()).decode()

    async def checked(scope: Any, receive: Any, send: Any) -> None:
        given = dict(scope["headers"]).get(b"authorization", b"")
        if hmac.compare_digest(given, said.encode()):
            await app(scope, receive, send)
            return
        way = "Basic" if username is not None else "Bearer"
        asks = [(b"www-authenticate", f'{way} realm="nemorl"'.encode()), (b"content-type", b"text/plain")]
        await send({"type": "http.response.start", "status": 401, "headers": asks})
        await send({"type": "http.response.body", "body": b"this endpoint asks for a token\n"})

    return checked
