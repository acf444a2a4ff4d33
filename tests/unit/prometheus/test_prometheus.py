"""The endpoint, read by Prometheus' own parser and client, and the dashboard, read by Grafana's own classes."""

from __future__ import annotations

import base64
import json
import math
import shutil
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from command_line import Command
from nemorl.config.load import validate
from nemorl.errors import ConfigError, UsageError
from nemorl.metrics import MetricInfo
from nemorl_cli.report.efficiency.declared_metrics import EFFICIENCY_METRICS
from nemorl_grpo import GRPOConfig
from nemorl_ops.prometheus.command import _installed
from nemorl_ops.prometheus.config import PrometheusConfig
from nemorl_ops.prometheus.dashboard import dashboard
from nemorl_ops.prometheus.logger import TARGETS, PrometheusLogger
from nemorl_ops.prometheus.names import Families, Family
from nemorl_rl.alerts.alert import Alert
from prometheus_client.parser import text_string_to_metric_families
from recorded_messages import Raises

GIB = 2.0**30


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "my-run"
    folder.mkdir()
    (folder / "config.yaml").write_text("algorithm: grpo\nmodel: org/model\n")
    return folder


@pytest.fixture
def logger(run_dir: Path) -> Iterator[PrometheusLogger]:
    made = PrometheusLogger(PrometheusConfig(port=0), run_dir)
    yield made
    made.close()


def scraped(logger: PrometheusLogger, **headers: str) -> str:
    request = urllib.request.Request(f"http://127.0.0.1:{logger.port}/metrics", headers=headers)
    with urllib.request.urlopen(request, timeout=20) as answer:
        text: str = answer.read().decode()
    return text


def samples(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """(name, labels beside those of the run) -> value, by Prometheus' own parser."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            rest = tuple((k, v) for k, v in sorted(sample.labels.items()) if k not in ("run", "algorithm"))
            found[sample.name, rest] = sample.value
    return found


# Names


@pytest.mark.parametrize(
    ("declared", "unit", "name", "labels"),
    [
        ("train/reward", "", "nemorl_train_reward", ()),
        ("train/reward/<part>", "", "nemorl_train_reward_part", ("part",)),
        ("timing/train/generation", "seconds", "nemorl_timing_train_generation_seconds", ()),
        ("train/weight_sync_bytes", "bytes", "nemorl_train_weight_sync_bytes", ()),
        ("system/node.<n>.mem_gib", "GiB", "nemorl_system_node_mem_bytes", ("node",)),
        ("system/node.<n>.gpu.<i>.util", "percent", "nemorl_system_node_gpu_util_ratio", ("node", "gpu")),
        ("performance/generator_idle_frac", "share", "nemorl_performance_generator_idle_ratio", ()),
        ("performance/tokens_per_sec", "tokens per second", "nemorl_performance_tokens_per_second", ()),
        ("validation/pass@<k>", "share", "nemorl_validation_pass_at_k_ratio", ("k",)),
        ("validation/<set>/reward", "", "nemorl_validation_set_reward", ("set",)),
    ],
)
def test_names_follow_the_conventions(declared: str, unit: str, name: str, labels: tuple[str, ...]) -> None:
    family = Family.of(declared, MetricInfo(unit=unit))
    assert (family.name, family.labels) == (name, labels)


def test_no_two_declared_metrics_have_one_name() -> None:
    declared = _installed()
    names = [Family.of(name, info).name for name, info in declared.items()]
    assert len(declared) > 150
    assert sorted(names) == sorted(set(names))
    assert not [name for name in names if not name.isascii() or not name.replace("_", "").isalnum()]


def test_undeclared_names_that_differ_in_punctuation_stay_apart() -> None:
    families = Families({})
    assert families.of("train/a.b")[0].name == "nemorl_train_a_b"
    assert families.of("train/a/b")[0].name == "nemorl_train_a_b_2"
    assert families.of("train/a.b")[0].name == "nemorl_train_a_b"


# The endpoint


def test_every_value_is_there_in_base_units_with_labels(logger: PrometheusLogger) -> None:
    assert "nemorl_" not in scraped(logger)  # nothing was logged yet
    logger.log({"train/reward": 0.25, "train/reward/format": 1.0, "timing/train/generation": 1.5}, 3)
    logger.log({"system/node.1.gpu.0.mem_gib": 2.0, "validation/pass@4": 0.5, "odd name!": math.nan}, 4)
    logger.alert(Alert("kl_high", "train/kl_penalty", 4, 2.0, "warning", "far"))
    text = scraped(logger)
    found = samples(text)
    assert found["nemorl_step", ()] == 4
    assert found["nemorl_train_reward", ()] == 0.25
    assert found["nemorl_train_reward_part", (("part", "format"),)] == 1.0
    assert found["nemorl_timing_train_generation_seconds", ()] == 1.5
    assert found["nemorl_system_node_gpu_mem_bytes", (("gpu", "0"), ("node", "1"))] == 2 * GIB
    assert found["nemorl_validation_pass_at_k_ratio", (("k", "4"),)] == 0.5
    assert found["nemorl_alerts_total", (("rule", "kl_high"), ("severity", "warning"))] == 1
    assert math.isnan(found["nemorl_odd_name", ()])
    assert 'nemorl_train_reward{algorithm="grpo",run="my-run"} 0.25' in text
    assert 'nemorl_run_info{algorithm="grpo",model="org/model",run="my-run"} 1.0' in text
    assert "# HELP nemorl_train_reward Reward. mean reward, as the environment gave it." in text


def test_prometheus_own_linter_has_nothing_to_say(logger: PrometheusLogger) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (apt-get install prometheus)")
    for number, name in enumerate([*GRPOConfig.metrics, *EFFICIENCY_METRICS]):
        logger.log({name.replace("<", "").replace(">", ""): 0.5}, number)
    done = subprocess.run(
        [promtool, "check", "metrics"], input=scraped(logger), capture_output=True, text=True, check=False
    )
    assert (done.stdout + done.stderr, done.returncode) == ("", 0)


def test_the_run_directory_names_the_endpoint_while_it_is_there(logger: PrometheusLogger, run_dir: Path) -> None:
    (group,) = json.loads((run_dir / TARGETS).read_text())
    assert group == {"targets": [f"127.0.0.1:{logger.port}"], "labels": {"job": "nemorl"}}
    logger.close()
    assert not (run_dir / TARGETS).exists()
    with pytest.raises(urllib.error.URLError):
        scraped(logger)


@pytest.mark.parametrize("username", [None, "scraper"])
def test_a_token_is_asked_for(run_dir: Path, monkeypatch: pytest.MonkeyPatch, username: str | None) -> None:
    monkeypatch.setenv("SCRAPE", "open sesame")
    logger = PrometheusLogger(PrometheusConfig(port=0, token_env="SCRAPE", username=username), run_dir)
    try:
        basic = "Basic " + base64.b64encode(b"scraper:open sesame").decode()
        right = "Bearer open sesame" if username is None else basic
        assert "process_cpu_seconds_total" in scraped(logger, Authorization=right)
        for wrong in ({}, {"Authorization": "Bearer no"}, {"Authorization": basic if username is None else "Basic x"}):
            with pytest.raises(urllib.error.HTTPError) as refused:
                scraped(logger, **wrong)
            assert refused.value.code == 401
            assert refused.value.headers["WWW-Authenticate"] == f'{"Basic" if username else "Bearer"} realm="nemorl"'
    finally:
        logger.close()


def test_a_port_that_is_taken_is_said(logger: PrometheusLogger, tmp_path: Path, raises: Raises) -> None:
    with raises(UsageError, logger.port, varies=rf"port {logger.port}"):
        PrometheusLogger(PrometheusConfig(port=logger.port), tmp_path)


@pytest.mark.parametrize("options", [{"host": "0.0.0.0"}, {"username": "me"}])
def test_other_machines_need_a_token(raises: Raises, options: dict[str, Any]) -> None:
    with raises(ConfigError):
        validate(PrometheusConfig, options, source="logger prometheus")


def test_an_empty_token_is_no_token(raises: Raises, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("SCRAPE", raising=False)
    with raises(UsageError):
        PrometheusConfig(port=0, token_env="SCRAPE").build(tmp_path)


# The dashboard


def queries(board: dict[str, Any]) -> list[str]:
    return [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]


def test_the_dashboard_asks_for_names_that_the_endpoint_has(logger: PrometheusLogger) -> None:
    declared = {name: info for name, info in {**GRPOConfig.metrics, **EFFICIENCY_METRICS}.items() if "<" not in name}
    logger.log(dict.fromkeys(declared, 1.0), 1)
    logger.alert(Alert("x", "y", 1, 1.0, "info", ""))
    exposed = {name for name, _ in samples(scraped(logger))}
    asked = {query.partition("{")[0].rpartition("(")[2] for query in queries(dashboard(declared))}
    assert len(asked) > 60
    assert asked <= exposed


def test_grafana_own_classes_read_the_dashboard() -> None:
    models = pytest.importorskip("grafana_foundation_sdk.models.dashboard")
    board = dashboard(_installed())
    read = models.Dashboard.from_json(board)
    assert (read.title, read.uid, len(read.panels)) == ("nemorl", "nemorl", len(board["panels"]))
    assert [variable.name for variable in read.templating.list_val] == ["datasource", "algorithm", "run"]
    assert {panel.type_val for panel in read.panels} == {"row", "stat", "timeseries"}


def test_panels_do_not_overlap_and_have_ids_of_their_own() -> None:
    panels = dashboard(_installed())["panels"]
    assert [panel["id"] for panel in panels] == list(range(1, len(panels) + 1))
    cells: set[tuple[int, int]] = set()
    for place in (panel["gridPos"] for panel in panels):
        own = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not own & cells
        assert place["x"] + place["w"] <= 24
        cells |= own


def test_the_command_writes_it(nemorl: Command, tmp_path: Path, run_dir: Path) -> None:
    nemorl("grafana", "--output", str(tmp_path / "all.json"))
    everything = json.loads((tmp_path / "all.json").read_text())
    mine = json.loads(nemorl("grafana", str(run_dir)).out)
    assert "nemorl_train_reward{" in str(queries(mine))
    assert "nemorl_train_rewards_margin" in str(set(queries(everything)) - set(queries(mine)))  # DPO's
