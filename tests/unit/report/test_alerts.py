"""Alerts: when rules hold, over series worked out by hand, over healthy runs, and in real short runs."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import nemorl
import pytest
from command_line import Command
from nemorl.base.files.jsonl import read_jsonl
from nemorl.config.load import validate
from nemorl.errors import ConfigError
from nemorl.plugins import Index, Registry, register
from nemorl.plugins.kinds import LoggerConfig
from nemorl.run import TrainResult
from nemorl_cli.console import Console
from nemorl_cli.report.run_data import RunData
from nemorl_cli.report.viewing.alerts import alerts_of, mark
from nemorl_rl.alerts.alert import EVENT, OVER, Alert
from nemorl_rl.alerts.builtin import BUILTIN
from nemorl_rl.alerts.conditions import Watch
from nemorl_rl.alerts.config import AlertsConfig, rule_problems
from nemorl_rl.alerts.hook import Watching
from nemorl_rl.alerts.rollout_rules import rollout_rules
from nemorl_rl.alerts.rules import Rule
from nemorl_rl.config import RolloutRunConfig
from nemorl_testing.plugin import use_registry
from recorded_messages import Raises
from safetensors.torch import load_file

HEALTHY = Path(__file__).with_name("healthy_runs.json")
"""Metrics of ``nemorl quickstart`` (seed 0), both stages, as recorded: SFT's 1000 records and GRPO's 106."""
ROWS = [{"prompt": f"{i}+1=", "response": str(i + 1)} for i in range(8)]


def changes(rule: Rule, values: Sequence[float]) -> list[tuple[int, str]]:
    """(position, change) of a rule over a series."""
    watch = Watch(rule)
    found = [(position, watch.take(value)) for position, value in enumerate(values, start=1)]
    return [(position, change) for position, change in found if change is not None]


# When rules hold


def test_a_threshold_must_hold_for_its_patience() -> None:
    rule = Rule(metric="m", above=1.0, patience=3)
    assert changes(rule, [2, 2, 1, 2, 2, 2, 2]) == [(6, "raised")]  # 1 is not above 1, and the count begins anew
    assert changes(Rule(metric="m", below=0.5), [1, 0.5, 0.4]) == [(3, "raised")]


def test_an_alert_is_raised_once_and_again_only_after_it_was_over() -> None:
    rule = Rule(metric="m", above=1.0, patience=2)
    assert changes(rule, [2, 2, 2, 0, 2, 0, 0, 2, 2]) == [(2, "raised"), (7, "over"), (9, "raised")]


def test_the_usual_is_the_median_of_the_window_before() -> None:
    rule = Rule(metric="m", above_usual=10.0, window=3)
    # 10 times the median of (1, 2, 9) is 20: 20 is not more, 21 is. The median of (2, 9, 20) is 9.
    assert changes(rule, [1, 2, 9, 20]) == []
    assert changes(rule, [1, 2, 9, 21, 21]) == [(4, "raised")]
    assert changes(rule, [1, 500]) == []  # there is no window yet
    assert changes(rule, [0, 0, 0, 5]) == []  # there is no multiple of nothing
    floor = Rule(metric="m", above_usual=10.0, least=2.0, window=3)
    assert changes(floor, [0.1, 0.1, 0.1, 2.0, 2.1]) == [(5, "raised")]


def test_a_fall_to_under_half_stays_one_alert_until_it_is_over() -> None:
    rule = Rule(metric="m", below_usual=0.5, window=4, patience=2)
    # What is under half is no part of what is usual: 40 is still under half of 100 after many of it.
    assert changes(rule, [100] * 4 + [40] * 20 + [60, 60]) == [(6, "raised"), (26, "over")]


def test_a_collapse_is_the_loss_of_half_of_what_was_gained() -> None:
    rule = Rule(metric="m", collapses=0.5, window=2)
    # Means of two: 0, .5, 1, 1, then 0.75 (a quarter of the range), then 0.25: three quarters of it.
    # The differences 1, 0, 0, 0.5, 0.5 have mean 0.4, so the noise of a mean is 0.4 / 1.128 / sqrt(2) = 0.251, and 8
    # times that is more than the whole range: a series this short and jumpy never counts as a collapse.
    assert changes(rule, [0, 1, 1, 1, 0.5, 0]) == []
    # 100 steps each: the one jump is 1 / 199 of noise a step, 8 * 0.005 / 1.128 / 1.414 = 0.025.
    assert changes(rule, [0.0] * 100 + [1.0] * 100 + [0.45] * 2) == [(202, "raised")]
    assert changes(rule, [0.0] * 100 + [1.0] * 100 + [0.55] * 9) == []  # less than half of the range
    assert changes(rule, [9.0] * 50 + [10.0] * 50 + [9.2] * 9) == []  # not a quarter of its best


def test_nan_and_infinity_are_found_and_do_not_hold_elsewhere() -> None:
    for value in (math.nan, math.inf, -math.inf):
        assert changes(BUILTIN["loss_not_finite"], [0.5, value, 0.5]) == [(2, "raised"), (3, "over")]
    assert changes(Rule(metric="m", above_usual=2, window=2), [1, 1, math.nan, 1, 3]) == [(5, "raised")]
    assert changes(Rule(metric="m", below=0.0), [math.nan]) == []


def test_a_pattern_watches_each_metric_by_itself() -> None:
    watching = Watching({"parts": Rule(metric="train/reward/<part>", below=0.0, patience=2)})
    records = [{"train/reward/a": -1.0, "train/reward/b": 1.0}, {"train/reward/a": -1.0, "train/reward/b": -1.0}]
    raised = [alert.metric for step, record in enumerate(records) for alert, _ in watching.take(record, step)]
    assert raised == ["train/reward/a"]


def test_a_pattern_that_fits_everything_passes_over_text() -> None:
    watching = Watching({"any": Rule(metric="<name>", above=0.0)})
    assert [alert.metric for alert, _ in watching.take({"causes": "reset: no sandbox", "lowest": 1.0}, 1)] == ["lowest"]


def test_json_has_null_for_what_is_not_finite() -> None:
    ((alert, is_raised),) = Watching(BUILTIN).take({"train/loss": None}, 7)
    assert (alert.rule, alert.step, is_raised) == ("loss_not_finite", 7, True)


# Nobody cries wolf


def test_healthy_runs_raise_no_alert() -> None:
    for name, columns in json.loads(HEALTHY.read_text()).items():
        watching = Watching(BUILTIN)
        steps = max(len(values) for values in columns.values())
        raised = [
            alert
            for step in range(steps)
            for alert, _ in watching.take({m: v[step] for m, v in columns.items() if v[step] is not None}, step)
        ]
        assert not raised, (name, raised)


def test_gradients_next_to_nothing_do_not_spike() -> None:
    """A policy that gets nearly everything right: rounding, and now and then a group that still teaches something."""
    noise = random.Random(0)
    learnt = [noise.choice((0.3, 0.6)) if step % 25 == 24 else abs(noise.gauss(0, 1e-4)) for step in range(600)]
    assert changes(BUILTIN["gradient_spike"], learnt) == []
    assert len(changes(BUILTIN["gradient_spike"].model_copy(update={"least": None}), learnt)) > 20
    usual = [abs(noise.gauss(0.3, 0.05)) for _ in range(100)]
    assert changes(BUILTIN["gradient_spike"], [*usual, 40.0, *usual[:5]]) == [(101, "raised"), (102, "over")]


@pytest.mark.parametrize("mean", [0.0, 0.5])
def test_noise_alone_is_no_collapse(mean: float) -> None:
    for seed in range(5):
        noise = random.Random(seed)
        rewards = [noise.gauss(mean, 0.1) for _ in range(1000)]
        assert changes(BUILTIN["reward_collapse"], rewards) == []


def test_a_real_collapse_is_found_within_a_few_steps() -> None:
    for seed in range(5):
        noise = random.Random(seed)
        rewards = [noise.gauss(0.2 + 0.6 * min(1, step / 200) if step < 300 else 0.2, 0.1) for step in range(330)]
        ((place, _),) = changes(BUILTIN["reward_collapse"], rewards)
        assert 301 <= place <= 315


def test_the_page_has_every_rule_as_it_is() -> None:
    page = (Path(__file__).parents[3] / "docs" / "alerts.md").read_text()
    of_rollouts = dict(rollout_rules(validate(RolloutRunConfig, {"model": "some/model"})))
    for name, rule in {**BUILTIN, **of_rollouts}.items():
        records = f"{rule.patience} record{'s' if rule.patience > 1 else ''}"
        assert f"| `{name}` | `{rule.metric}` | {rule.condition} | {records} | {rule.severity}" in page


def test_limits_of_rollouts_are_set_there_alone() -> None:
    run = validate(RolloutRunConfig, {"model": "some/model", "rollouts": {"mismatch_warning": 1.2}})
    rules = {"sampler_mismatch": {"above": 1.1}, "few_mixed_groups": {"action": "lower_rate"}}
    (problem,) = rule_problems(validate(AlertsConfig, {"rules": rules}), run)
    assert (problem.path, problem.fix) == ("rules.sampler_mismatch", "set rollouts.mismatch_warning")
    off = {"mismatch_limit": None, "breaker": {"failed_steps": 0, "equal_steps": 0}}
    left = rollout_rules(validate(RolloutRunConfig, {"model": "some/model", "rollouts": off}))
    assert [name for name, _ in left] == ["sampler_mismatch", "some_episodes_failed"]


# In runs


class Heard(LoggerConfig):
    """Keeps alerts."""

    alerts: ClassVar[list[Alert]] = []

    def build(self, run_dir: Path) -> Any:
        return self

    def log(self, metrics: Mapping[str, float], step: int) -> None: ...

    def alert(self, alert: Alert) -> None:
        self.alerts.append(alert)

    def close(self) -> None: ...


@pytest.fixture
def heard() -> Iterator[list[Alert]]:
    with use_registry(Registry(Index.installed())):
        register("loggers", "heard")(Heard)
        Heard.alerts.clear()
        yield Heard.alerts


def fit(
    model: Path, run_dir: Path, rules: Mapping[str, Any], *, resume: bool = False, steps: int = 6, **more: Any
) -> TrainResult:
    trainer = nemorl.SFTTrainer.from_pretrained(
        str(model),
        run_dir=run_dir,
        **{
            "batch_size": 2,
            "max_steps": steps,
            "validation": {"every": 0, "at_end": False},
            "checkpoint": {"every": 0, "keep_last": 10, "keep_best": 0, "export": False},
            "policy": {"init": "random", "max_sequence_tokens": 32, "optimizer": {"lr": 1e-3}},
            "plugins": {"hooks": [{"name": "alerts", "rules": rules}]},
            **more,
        },
    )
    result: TrainResult = trainer.fit(ROWS, val_dataset=ROWS, resume=resume, console=Console(quiet=True))
    return result


def alerts_in(run_dir: Path) -> list[tuple[str, int]]:
    return [(e["rule"], e["step"]) for e in read_jsonl(run_dir / "events.jsonl") if e["event"] == "alert"]


ALWAYS = {"metric": "train/loss", "above": 0.0, "patience": 2, "meaning": "It is positive."}


@pytest.mark.slow
def test_an_alert_is_told_everywhere(tiny_model: Path, tmp_path: Path, heard: list[Alert], nemorl: Command) -> None:
    run = fit(tiny_model, tmp_path / "run", {"always": ALWAYS}, loggers=["heard"]).run_dir
    assert alerts_in(run) == [("always", 2)]
    (event,) = [e for e in read_jsonl(run / "events.jsonl") if e["event"] == "alert"]
    assert event["severity"] == "warning"
    assert event["action"] == "warn"
    assert event["metric"] == "train/loss"
    assert event["text"].endswith("at step 2: above 0. It is positive.")
    assert [alert.text for alert in heard] == [event["text"]]
    assert event["text"] in (run / "report.html").read_text()
    assert f"alert always: {event['text']}" in nemorl("view", "watch", str(run)).err.replace("\n", " ")


def test_the_page_has_each_alert_once_with_what_was_done_and_when_it_was_over() -> None:
    rule = Rule(metric="train/loss", above=1.0, meaning="It is high.", action="lower_rate", rate_factor=0.3)
    raised = [
        {"event": EVENT, **Alert.of("high", rule, "train/loss", step, 2.0, {}).facts} for step in (4, 9, 9)
    ]  # the run went back behind step 9
    over = {"event": OVER, "rule": "high", "metric": "train/loss", "step": 6}
    damaged = [{"event": EVENT}, {"event": OVER, "step": 5}, {"event": EVENT, "step": 7, "value": "x"}]
    run = RunData("run", events=(raised[0], over, *raised[1:], *damaged), metrics={"train/loss": {4: 2.0, 9: 2.0}})
    first, odd, last = alerts_of(run)
    assert (first["step"], first["until"], last["step"], last["until"]) == (4, 6, 9, None)
    assert (first["value"], first["limit"], first["action"]) == (2.0, "above 1", "lower_rate")
    assert first["advice"] == "It is high. The learning rate is multiplied by 0.3."
    assert (odd["step"], odd["value"]) == (7, None)
    cards: list[dict[str, Any]] = [{"series": [{"metric": "train/loss"}]}, {"series": [{"label": "x"}]}]
    mark(cards, alerts_of(run))
    assert [len(card["alerts"]) for card in cards] == [2, 0]


def test_stop_ends_the_run_after_the_step(tiny_model: Path, tmp_path: Path) -> None:
    result = fit(tiny_model, tmp_path, {"always": {**ALWAYS, "action": "stop"}})
    assert result.steps == 2
    assert (result.stopped or "").startswith("alert always: train/loss is ")


def test_save_writes_a_checkpoint_after_the_step(tiny_model: Path, tmp_path: Path) -> None:
    fit(tiny_model, tmp_path, {"always": {**ALWAYS, "action": "save"}})
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step_000002", "step_000006"]


@pytest.mark.slow
def test_a_lowered_rate_survives_a_resume_bit_by_bit(tiny_model: Path, tmp_path: Path) -> None:
    lowers = {"always": {**ALWAYS, "patience": 3, "action": "lower_rate", "rate_factor": 0.25}}
    whole = fit(tiny_model, tmp_path / "whole", lowers)
    rates = [record["train/lr"] for record in read_jsonl(whole.run_dir / "metrics.jsonl")]
    assert rates == [1e-3] * 3 + [2.5e-4] * 3
    for stopped_after in (2, 4):  # before the alert, when two of its three steps are seen, and after it
        run_dir = tmp_path / str(stopped_after)
        fit(tiny_model, run_dir, lowers, steps=stopped_after)
        fit(tiny_model, run_dir, lowers, resume=True)
        assert alerts_in(run_dir) == [("always", 3)]
        assert _weights(run_dir) == _weights(whole.run_dir)


def _weights(run_dir: Path) -> dict[str, bytes]:
    (file,) = (run_dir / "checkpoints" / "step_000006" / "policy" / "model").iterdir()
    return {name: tensor.numpy().tobytes() for name, tensor in load_file(file).items()}


@pytest.mark.slow
def test_alerts_change_nothing_and_can_be_off(tiny_model: Path, tmp_path: Path) -> None:
    fit(tiny_model, tmp_path / "on", {"always": ALWAYS})
    off = {"hooks": [{"name": "alerts", "enabled": False, "rules": {"always": ALWAYS}}]}
    fit(tiny_model, tmp_path / "off", {}, plugins=off)
    assert alerts_in(tmp_path / "off") == []
    assert _weights(tmp_path / "on") == _weights(tmp_path / "off")


@pytest.mark.slow
def test_rules_of_nemorl_can_be_set_otherwise_or_left_out(tiny_model: Path, tmp_path: Path) -> None:
    spikes = {"gradient_spike": {"above": 0.0, "patience": 4}}  # another condition takes the place of its own
    assert alerts_in(fit(tiny_model, tmp_path / "a", spikes).run_dir) == [("gradient_spike", 4)]
    without = {"hooks": [{"name": "alerts", "without": ["gradient_spike"]}]}
    assert alerts_in(fit(tiny_model, tmp_path / "b", {}, plugins=without).run_dir) == []


@pytest.mark.slow
def test_a_plugin_of_the_run_may_bring_rules(tiny_model: Path, tmp_path: Path) -> None:
    class Bringing(LoggerConfig):
        alert_rules: ClassVar[Mapping[str, Rule]] = {"brought": Rule(metric="train/loss", above=0.0)}

        def build(self, run_dir: Path) -> Any:
            return Heard()

    with use_registry(Registry(Index.installed())):
        register("loggers", "bringing")(Bringing)
        run = fit(tiny_model, tmp_path, {"brought": {"patience": 3}}, loggers=["bringing"]).run_dir
    assert alerts_in(run) == [("brought", 3)]


@pytest.mark.parametrize(
    ("hook", "path", "fix"),
    [
        ({"rules": {"kl_hihg": {"above": 1}}}, "rules.kl_hihg", "Did you mean 'kl_high'?"),
        ({"without": ["entropy_gon"]}, "without.0", "Did you mean 'entropy_gone'?"),
        ({"rules": {"x": {"metric": "train/grad_nrm", "above": 1}}}, "rules.x.metric", "mean 'train/grad_norm'?"),
        ({"rules": {"x": {"metric": "train/loss"}}}, "rules.x", "set one of above, below"),
        ({"rules": {"loss_not_finite": {"above": 1, "below": 0}}}, "rules.loss_not_finite", "set one of above, below"),
        ({"rules": {"x": {"metric": "train/loss", "abov": 1}}}, "rules.x.abov", "unknown key"),
        ({"rules": {"x": {"above": 1}}}, "rules.x.metric", "write its full name"),
    ],
)  # fmt: skip
def test_mistakes_are_found_before_anything_loads(
    tiny_model: Path, tmp_path: Path, raises: Raises, hook: dict[str, Any], path: str, fix: str
) -> None:
    with raises(ConfigError) as caught:
        fit(tiny_model, tmp_path, {}, plugins={"hooks": [{"name": "alerts", **hook}]})
    assert f"plugins.hooks.0.{path}" in str(caught.value)
    assert fix in str(caught.value)
