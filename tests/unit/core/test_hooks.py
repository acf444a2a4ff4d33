"""Lifecycle events: which fire in a real (tiny) run and in what order, what implementations may ask for, and what
happens when one raises."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nemorl
import pytest
import yaml
from nemorl.config.plugin_lists import PluginsConfig, policy_of
from nemorl.config.run import RunConfig
from nemorl.errors import ConfigError, ForeignError, PluginError, UsageError
from nemorl.plugins import Index, Registry
from nemorl.plugins.hooks import CONTROL, EVENTS, Hooks, HookSpecs, build_hooks
from nemorl.plugins.kinds import HookConfig
from nemorl.trainer import BaseTrainer, TrainResult
from nemorl_cli.console import Console
from nemorl_rl.callbacks import Callback, EarlyStopping
from nemorl_testing.plugin import use_registry
from pydantic import Field, ValidationError
from recorded_messages import Raises

ROWS = [{"prompt": f"{i}+{i}=", "answer": str(2 * i)} for i in range(4)]


def knobs(model: Path, run_dir: Path, **changes: Any) -> dict[str, Any]:
    """Two steps of two prompts with two responses of three tokens: about a second."""
    return {
        "algorithm": "grpo",
        "model": str(model),
        "run_dir": str(run_dir),
        "max_steps": 2,
        "num_prompts_per_step": 2,
        "num_generations_per_prompt": 2,
        "kl_penalty": 0.0,
        "policy": {"init": "random", "max_sequence_tokens": 32},
        "generation": {"max_new_tokens": 3},
        "validation": {"every": 1, "max_samples": 2},
        "checkpoint": {"every": 1, "export": False},
        **changes,
    }


def reward(prompt: str, response: str, answer: str) -> float:
    return float(len(response))


def fit(config: dict[str, Any], callbacks: list[object], **options: Any) -> TrainResult:
    trainer = nemorl.load_config(config).build()
    return trainer.fit(ROWS, reward, val_dataset=ROWS, callbacks=callbacks, console=Console(quiet=True), **options)


class Everything(Callback):
    """Writes down every event with its arguments."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, dict[str, Any]]] = []


def _recorder(event: str) -> Any:
    names = [name for name in HookSpecs.__dict__[event].__code__.co_varnames if name != "self"]
    body = ", ".join(f"{name}={name}" for name in names)
    return _define(f"def {event}(self, {', '.join(names)}):\n    self.seen.append(({event!r}, dict({body})))\n", event)


def _define(source: str, name: str) -> Any:
    space: dict[str, Any] = {}
    exec(source, space)
    return space[name]


for _event in EVENTS:
    setattr(Everything, _event, _recorder(_event))


@pytest.fixture(scope="module")
def recorded(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Everything, TrainResult]:
    watcher = Everything()
    result = fit({**knobs(tiny_model, tmp_path_factory.mktemp("hooks") / "run"), **PROVEN}, [watcher])
    return watcher, result


PROVEN = {"weights": {"share": 1.0}}
STEP = ["on_step_begin", "on_rollout_end", "on_weights_proven", "on_weights_synced", "on_log", "on_step_end"]
VALIDATION = ["on_log", "on_validation_end"]


def test_events_fire_in_order(recorded: tuple[Everything, TrainResult]) -> None:
    # 4 rows in batches of 2: both steps belong to one epoch. The last step's validation and checkpoint are the end's.
    assert [event for event, _ in recorded[0].seen] == [
        "on_build_end",
        "on_weights_proven",
        "on_weights_synced",
        "on_fit_begin",
        "on_epoch_begin",
        *STEP,
        *VALIDATION,
        "on_checkpoint_saved",
        *STEP,
        "on_epoch_end",
        *VALIDATION,
        "on_checkpoint_saved",
        "on_fit_end",
    ]


def test_every_event_but_the_exception_fires_in_a_run(recorded: tuple[Everything, TrainResult]) -> None:
    assert {event for event, _ in recorded[0].seen} == set(EVENTS) - {"on_exception"}


def test_events_carry_what_they_promise(recorded: tuple[Everything, TrainResult]) -> None:
    watcher, result = recorded
    by_event: dict[str, list[dict[str, Any]]] = {}
    for event, arguments in watcher.seen:
        assert isinstance(arguments["trainer"], BaseTrainer)
        by_event.setdefault(event, []).append(arguments)
    assert [a["step"] for a in by_event["on_step_begin"]] == [1, 2]
    assert [a["step"] for a in by_event["on_step_end"]] == [1, 2]
    assert [a["version"] for a in by_event["on_weights_synced"]] == [0, 1, 2]
    assert [len(a["samples"]) for a in by_event["on_rollout_end"]] == [4, 4]
    assert [sample.weight_versions for a in by_event["on_rollout_end"] for sample in a["samples"]] == [(0,)] * 4 + [
        (1,)
    ] * 4
    assert all("loss" in a["metrics"] and "reward" in a["metrics"] for a in by_event["on_step_end"])
    assert "train/reward" in by_event["on_log"][0]["metrics"]
    assert "validation/accuracy" in by_event["on_log"][1]["metrics"]
    assert set(by_event["on_validation_end"][0]["metrics"]) >= {"accuracy", "reward", "avg_length"}
    assert [a["path"].name for a in by_event["on_checkpoint_saved"]] == ["step_000001", "step_000002"]
    assert by_event["on_fit_end"][0]["metrics"] == dict(result.metrics)
    assert [a["epoch"] for a in (*by_event["on_epoch_begin"], *by_event["on_epoch_end"])] == [0, 0]


def test_an_exception_is_told_to_the_hooks_and_recorded(tiny_model: Path, tmp_path: Path, raises: Raises) -> None:
    class Angry(Callback):
        essential = True

        def on_step_begin(self, step: int) -> None:
            raise ValueError("enough")

    watcher = Everything()
    with raises(ForeignError, "on_step_begin", 0, "Angry", "ValueError", "enough"):
        fit(knobs(tiny_model, tmp_path / "run"), [Angry(), watcher])
    event, arguments = watcher.seen[-1]
    assert event == "on_exception"
    assert isinstance(arguments["error"], ForeignError)
    lines = [json.loads(line) for line in (tmp_path / "run/events.jsonl").read_text().splitlines()]
    assert lines[-1]["event"] == "failed"
    assert "enough" in lines[-1]["error"]


def test_an_observer_that_raises_is_reported_once_and_disabled(tiny_model: Path, tmp_path: Path) -> None:
    class Clumsy(Callback):
        calls = 0

        def on_step_end(self, metrics: dict[str, float]) -> None:
            self.calls += 1
            raise KeyError("loss_of_mind")

        def on_fit_end(self) -> None:
            self.calls += 100

    clumsy, watcher = Clumsy(), Everything()
    result = fit(knobs(tiny_model, tmp_path / "run"), [clumsy, watcher])
    assert result.steps == 2
    assert clumsy.calls == 1
    assert [event for event, _ in watcher.seen].count("on_step_end") == 2
    lines = [json.loads(line) for line in (tmp_path / "run/events.jsonl").read_text().splitlines()]
    (warning,) = [line for line in lines if line["event"] == "warning"]
    assert "hook on_step_end of callback 0 (Clumsy) raised KeyError" in warning["message"]
    assert "disabled for the rest of this run" in warning["message"]


def test_a_run_can_be_stopped_by_a_callback(tiny_model: Path, tmp_path: Path) -> None:
    class Enough(Callback):
        def on_step_end(self, trainer: BaseTrainer[RunConfig]) -> None:
            trainer.stop("seen enough")

    result = fit(knobs(tiny_model, tmp_path / "run"), [Enough()])
    assert result.steps == 1
    assert result.stopped == "seen enough"
    assert (tmp_path / "run/checkpoints/step_000001/manifest.json").is_file()


# The manager alone


@pytest.fixture
def reports() -> list[str]:
    return []


@pytest.fixture
def hooks(reports: list[str]) -> Hooks:
    return Hooks(reports.append)


def test_an_implementation_takes_any_subset_of_the_arguments(hooks: Hooks) -> None:
    got: list[Any] = []

    class Few:
        def on_step_end(self, step: int) -> None:
            got.append(step)

        def on_fit_end(self) -> None:
            got.append("end")

    hooks.register(Few(), "few")
    hooks.fire("on_step_end", trainer=None, step=3, metrics={})
    hooks.fire("on_fit_end", trainer=None, metrics={})
    assert got == [3, "end"]


def test_an_observer_is_disabled_for_all_its_events(hooks: Hooks, reports: list[str]) -> None:
    class Clumsy:
        def on_step_begin(self) -> None:
            raise RuntimeError("first")

        def on_step_end(self) -> None:
            raise RuntimeError("second")

    hooks.register(Clumsy(), "clumsy")
    for _ in range(3):
        hooks.fire("on_step_begin", trainer=None, step=1)
        hooks.fire("on_step_end", trainer=None, step=1, metrics={})
    assert len(reports) == 1
    assert "first" in reports[0]
    assert hooks.failures == {"clumsy": 1}


@pytest.mark.parametrize("event", sorted(CONTROL))
def test_a_control_event_ends_the_run_and_names_the_plugin(
    hooks: Hooks, event: str, reports: list[str], raises: Raises
) -> None:
    plugin = type("Guard", (), {event: lambda self: 1 / 0})()
    hooks.register(plugin, "acme:guard")
    with raises(ForeignError, event, "acme:guard", "ZeroDivisionError") as caught:
        hooks.fire(event, trainer=None)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert reports == []


def test_nemorls_own_errors_pass_an_essential_callback_unchanged(hooks: Hooks, raises: Raises) -> None:
    class Strict:
        essential = True

        def on_step_end(self) -> None:
            raise UsageError("not like this", fix="like that")

    hooks.register(Strict(), "strict")
    with raises(UsageError):
        hooks.fire("on_step_end", trainer=None, step=1, metrics={})


def test_one_of_our_errors_in_an_observer_does_not_end_the_run(hooks: Hooks, reports: list[str]) -> None:
    class Curious:
        def on_step_end(self) -> None:
            raise UsageError("no field 'x'")

    hooks.register(Curious(), "curious")
    hooks.fire("on_step_end", trainer=None, step=1, metrics={})
    assert len(reports) == 1
    assert "curious" in reports[0]


class Loud:
    """Says its name at every step."""

    def __init__(self, name: str) -> None:
        self.name = name

    def on_step_end(self) -> None:
        called.append(self.name)


class LoudConfig(HookConfig):
    """A hook plugin of the tests."""

    word: str = "loud"
    """What it says at every step."""
    times: int = Field(1, ge=1, le=3)
    """How often."""

    def build(self) -> object:
        return Loud(" ".join([self.word] * self.times))


class LouderConfig(LoudConfig):
    """Another."""

    word: str = "louder"
    """What it says."""


called: list[str] = []


@pytest.fixture
def with_hooks() -> Iterator[Registry]:
    scoped = Registry(Index.installed())
    scoped.register("hooks", "loud", LoudConfig)
    scoped.register("hooks", "louder", LouderConfig)
    called.clear()
    with use_registry(scoped):
        yield scoped


@pytest.mark.parametrize("enabled", [["loud", "louder"], ["louder", "loud"]])
def test_the_call_order_is_the_configs_then_the_callbacks(with_hooks: Registry, enabled: list[str]) -> None:
    configs = PluginsConfig.model_validate({"hooks": enabled}).hooks
    hooks = build_hooks(with_hooks, configs, [Loud("third"), Loud("fourth")], print)
    hooks.fire("on_step_end", trainer=None, step=1, metrics={})
    assert called == [*enabled, "third", "fourth"]


class StuckConfig(HookConfig):
    """A hook that waits for something as it is built."""

    def build(self) -> object:
        time.sleep(600)
        return object()


def test_a_hook_that_is_never_built_is_named(with_hooks: Registry, raises: Raises) -> None:
    with_hooks.register("hooks", "stuck", StuckConfig)
    listed = PluginsConfig.model_validate({"hooks": ["stuck"]}).hooks
    with raises(PluginError, "stuck", 0.05, "plugins.build_timeout_s"):
        build_hooks(with_hooks, listed, [], print, build_limit_s=0.05)


def test_two_callbacks_of_one_class_are_both_called(with_hooks: Registry) -> None:
    callbacks = [Loud("one"), Loud("two")]
    build_hooks(with_hooks, [], callbacks, print).fire("on_step_end", trainer=None, step=1, metrics={})
    assert called == ["one", "two"]


def test_a_hook_of_every_run_may_be_listed_and_is_there_once(with_hooks: Registry, raises: Raises) -> None:
    listed = PluginsConfig.model_validate({"hooks": ["records", "loud"]}).hooks
    hooks = build_hooks(with_hooks, listed, [], print)
    taken = [entry.id for entry in with_hooks.index.of_kind("hooks") if entry.name in ("records", "loud")]
    for name in taken:
        with raises(PluginError):
            hooks.register(Loud("again"), name)


def test_hooks_of_the_config_run_with_their_options(with_hooks: Registry, tiny_model: Path, tmp_path: Path) -> None:
    plugins = {"hooks": ["louder", {"name": "loud", "times": 2}]}
    fit(knobs(tiny_model, tmp_path / "run", plugins=plugins, max_steps=1), [])
    assert called == ["louder", "loud loud"]
    resolved = yaml.safe_load((tmp_path / "run/config.yaml").read_text())
    assert resolved["plugins"]["hooks"] == [
        {"name": "louder", "word": "louder", "times": 1},
        {"name": "loud", "word": "loud", "times": 2},
    ]
    (plugin,) = [
        plugin
        for plugin in json.loads((tmp_path / "run/plugins.lock.json").read_text())["plugins"]
        if any(part.startswith("hooks:") for part in plugin["parts"])
    ]
    assert plugin["parts"] == ["hooks:loud", "hooks:louder"]


@pytest.mark.parametrize(
    ("hooks", "path", "words"),
    [
        (["loud", {"name": "loudest"}], "plugins.hooks.1", "Did you mean 'loud"),
        ([{"name": "loud", "tmes": 2}], "plugins.hooks.0.tmes", "Did you mean 'times'"),
        (["louder", {"name": "loud", "times": 4}], "plugins.hooks.1.times", "4 is out of range"),
        ([{"name": "loud", "times": 2}, "louder", "loud"], "plugins.hooks.2", "hook 'loud' is listed twice"),
        ([{"times": 2}], "plugins.hooks.0", "these have times: loud"),
        ("loud", "plugins.hooks", "expected a list"),
        ([Loud("an object")], "plugins.hooks.0", "expected the name of a hook"),
    ],
)
def test_a_wrong_hook_is_an_issue_of_the_config(
    with_hooks: Registry, tiny_model: Path, tmp_path: Path, hooks: Any, path: str, words: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        nemorl.load_config({**knobs(tiny_model, tmp_path / "run"), "plugins": {"hooks": hooks}})
    (issue,) = caught.value.problems
    assert issue.path == path
    assert words in f"{issue.message} {issue.fix}"


def test_a_resolved_config_loads_to_the_same_hooks(with_hooks: Registry, tiny_model: Path, tmp_path: Path) -> None:
    hooks = ["louder", {"name": "loud", "word": "ha", "times": 3}]
    config = nemorl.load_config({**knobs(tiny_model, tmp_path / "run"), "plugins": {"hooks": hooks}})
    assert config.plugins.hooks == (LouderConfig(), LoudConfig(word="ha", times=3))
    again = nemorl.load_config(json.loads(json.dumps(config.model_dump(mode="json"))))
    assert again == config


@pytest.mark.parametrize("policy", [{"block": ["acme-hooks"]}, {"allow": ["nemorl-grpo"]}], ids=["block", "allow"])
def test_a_hook_that_the_policy_refuses_is_not_imported(
    policy: dict[str, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raises: Raises
) -> None:
    info = tmp_path / "acme_hooks-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-hooks\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[nemorl.hooks]\nquiet = acme_hooks:Quiet\n")
    (tmp_path / "acme_hooks.py").write_text("raise RuntimeError('it was imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    with use_registry(Registry(Index.installed())):
        for make in (PluginsConfig.model_validate, lambda data: PluginsConfig(**data)):
            with raises(ValidationError, "acme-hooks", path="hooks.0"):
                make({"hooks": ["quiet"], **policy})
        with raises(ConfigError, "acme-hooks"):
            nemorl.load_config({"algorithm": "grpo", "plugins": {"hooks": ["quiet"], **policy}})
        with raises(ValidationError, path="hooks.0"):
            PluginsConfig.model_validate({"hooks": ["quiet"]})
        assert not policy_of({"hooks": ["quiet"], **policy}).admits("acme-hooks")


def test_every_event_is_documented() -> None:
    assert len(EVENTS) == 14
    assert all((HookSpecs.__dict__[event].__doc__ or "").strip() for event in EVENTS)


# Early stopping


class Stopped:
    reason: str | None = None

    def stop(self, reason: str) -> None:
        self.reason = reason


def after(stopping: EarlyStopping, values: list[float], metric: str = "accuracy") -> tuple[int, str | None]:
    """Validations until the callback stops, and its reason."""
    trainer = Stopped()
    for count, value in enumerate(values, 1):
        stopping.on_validation_end(trainer, count, {metric: value})
        if trainer.reason is not None:
            return count, trainer.reason
    return len(values), None


def test_early_stopping_at_a_threshold() -> None:
    assert after(EarlyStopping(threshold=0.9), [0.1, 0.95, 1.0]) == (2, "accuracy reached 0.9")
    assert after(
        EarlyStopping("val_loss", threshold=0.5, higher_is_better=False), [2.0, 0.6, 0.5, 0.1], "val_loss"
    ) == (
        3,
        "val_loss reached 0.5",
    )


def test_early_stopping_without_improvement() -> None:
    # Best at the second, then two without a new best. An equal value is no improvement.
    assert after(EarlyStopping(patience=2), [0.1, 0.5, 0.5, 0.4, 0.9])[0] == 4
    assert after(EarlyStopping("loss", patience=1, higher_is_better=False), [3, 2, 1, 1.5], "loss")[0] == 4
    assert after(EarlyStopping(), [0.5] * 20) == (20, None)
