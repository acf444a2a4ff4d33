"""The ready-made callbacks, on real short runs."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nemorl
import pytest
from nemorl.errors import ConfigError, PluginNotFoundError, UsageError
from nemorl.plugins import Index, Registry, register
from nemorl.plugins.kinds import LoggerConfig
from nemorl.run import TrainResult
from nemorl_cli.console import Console
from nemorl_rl.callbacks import Callback, CheckpointCallback, EarlyStopping, LoggerCallback, WandbCallback
from nemorl_testing.plugin import use_registry
from recorded_messages import Raises

ROWS = [{"prompt": f"{i}+1=", "response": str(i + 1)} for i in range(8)]


def fit(model: Path, run_dir: Path, *callbacks: object, resume: bool = False, **changes: Any) -> TrainResult:
    settings = {
        "batch_size": 2,
        "max_steps": 6,
        "validation": {"every": 0, "at_end": False},
        "checkpoint": {"every": 0, "keep_last": 10, "keep_best": 0, "export": False},
        "policy": {"init": "random", "max_sequence_tokens": 32},
        **changes,
    }
    trainer = nemorl.SFTTrainer.from_pretrained(str(model), run_dir=run_dir, **settings)
    console = Console(quiet=True)
    result: TrainResult = trainer.fit(ROWS, val_dataset=ROWS, callbacks=callbacks, resume=resume, console=console)
    return result


def saved(run_dir: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step_")) for path in (run_dir / "checkpoints").iterdir())


# Validations without a verdict


class Trainer:
    """What the callback asks of one."""

    def __init__(self) -> None:
        self.reasons: list[str] = []

    def stop(self, reason: str) -> None:
        self.reasons.append(reason)


def test_a_validation_that_failed_is_no_lack_of_improvement() -> None:
    stopping, trainer = EarlyStopping("accuracy", patience=2), Trainer()
    failed, worse = {"failed_frac": 1.0}, {"accuracy": 0.5, "failed_frac": 0.25}
    for step, metrics in enumerate([{"accuracy": 0.6}, worse, failed, failed, failed]):
        stopping.on_validation_end(trainer, step, metrics)
    assert trainer.reasons == []
    stopping.on_validation_end(trainer, 6, worse)
    assert trainer.reasons == ["accuracy has not improved for 2 validations"]


def test_a_metric_that_is_no_number_is_no_best_and_counts_alike_after_a_resume(tmp_path: Path) -> None:
    values = [math.nan, 0.5, math.nan, 0.5]
    stopping, trainer = EarlyStopping("accuracy", patience=3), Trainer()
    for step, value in enumerate(values):
        stopping.on_validation_end(trainer, step, {"accuracy": value})
    records = [{"validation/accuracy": None if math.isnan(value) else value} for value in values]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    resumed = EarlyStopping("accuracy", patience=3)
    resumed.on_fit_begin(SimpleNamespace(run=SimpleNamespace(path=tmp_path)))
    assert trainer.reasons == []
    for one in (stopping, resumed):  # the third without a new best
        one.on_validation_end(trainer, 4, {"accuracy": 0.5})
    assert len(trainer.reasons) == 2


# Checkpoints


def test_checkpoints_come_every_so_often_and_at_the_end(tiny_model: Path, tmp_path: Path) -> None:
    fit(tiny_model, tmp_path, CheckpointCallback(every=2))
    assert saved(tmp_path) == [2, 4, 6]


def test_only_so_many_checkpoints_are_kept(tiny_model: Path, tmp_path: Path) -> None:
    fit(tiny_model, tmp_path, CheckpointCallback(every=1, keep=2))
    assert saved(tmp_path) == [5, 6]


@pytest.mark.slow
def test_what_the_run_saves_itself_is_not_saved_twice(tiny_model: Path, tmp_path: Path) -> None:
    checkpoint = {"every": 2, "keep_last": 10, "keep_best": 0, "export": False}
    fit(tiny_model, tmp_path, CheckpointCallback(every=1), checkpoint=checkpoint)
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [event["step"] for event in events if event["event"] == "checkpoint"] == [1, 2, 3, 4, 5, 6]


def test_a_checkpoint_is_ranked_by_the_validation_of_its_own_step(tiny_model: Path, tmp_path: Path) -> None:
    class LossOfEachStep(Callback):
        seen: Mapping[int, float] = {}

        def on_validation_end(self, step: int, metrics: Mapping[str, float]) -> None:
            self.seen = {**self.seen, step: metrics["val_loss"]}

    losses = LossOfEachStep()
    fit(tiny_model, tmp_path, losses, CheckpointCallback(every=2), validation={"every": 2, "at_end": True})
    assert saved(tmp_path) == [2, 4, 6]
    for step in (2, 4, 6):
        manifest = json.loads((tmp_path / f"checkpoints/step_{step:06d}/manifest.json").read_text())
        assert manifest["metrics"]["validation/val_loss"] == losses.seen[step]


@pytest.mark.parametrize("settings", [{"every": 0}, {"keep": 0}])
def test_an_impossible_checkpoint_schedule_is_refused(settings: dict[str, int], raises: Raises) -> None:
    with raises(UsageError, "CheckpointCallback"):
        CheckpointCallback(**settings)


# Early stopping


def test_a_run_ends_when_validation_stops_improving(tiny_model: Path, tmp_path: Path) -> None:
    # Nothing improves by more than 100 nats, so the second and third validation count against it.
    stopping = EarlyStopping("val_loss", patience=2, min_delta=100.0, higher_is_better=False)
    result = fit(tiny_model, tmp_path, stopping, validation={"every": 1})
    assert (result.steps, result.stopped) == (3, "val_loss has not improved for 2 validations")


@pytest.mark.slow
def test_a_resumed_run_remembers_the_validations_before(tiny_model: Path, tmp_path: Path) -> None:
    class StopAfterOne(Callback):
        def on_step_end(self, trainer: Any, step: int) -> None:
            if step == 2:
                trainer.stop("for the test")

    def stopping() -> EarlyStopping:
        return EarlyStopping("val_loss", patience=2, min_delta=100.0, higher_is_better=False)

    assert fit(tiny_model, tmp_path, stopping(), StopAfterOne(), validation={"every": 1}).steps == 2
    assert fit(tiny_model, tmp_path, stopping(), validation={"every": 1}, resume=True).steps == 3


def test_a_metric_that_does_not_exist_is_reported_with_the_closest(tiny_model: Path, tmp_path: Path) -> None:
    result = fit(tiny_model, tmp_path, EarlyStopping("val_los", patience=1), validation={"every": 1})
    assert result.steps == 6
    warnings = [line for line in (tmp_path / "events.jsonl").read_text().splitlines() if "warning" in line]
    assert len(warnings) == 1
    assert "no metric 'val_los'" in warnings[0]


# Loggers


@pytest.fixture
def scoped() -> Iterator[Registry]:
    with use_registry(Registry(Index.installed())) as registry:
        yield registry


class Memory:
    """A logger that remembers."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.closed = 0

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self.steps.append(step)

    def close(self) -> None:
        self.closed += 1


MEMORY = Memory()


class MemoryConfig(LoggerConfig):
    """Hands out the one memory of this module."""

    def build(self, run_dir: Path) -> Memory:
        MEMORY.__init__()  # type: ignore[misc]
        return MEMORY


@pytest.mark.usefixtures("scoped")
def test_a_logger_by_name_gets_every_metric_and_is_closed(tiny_model: Path, tmp_path: Path) -> None:
    register("loggers", "memory")(MemoryConfig)
    fit(tiny_model, tmp_path, LoggerCallback("memory"), max_steps=3)
    assert (MEMORY.steps, MEMORY.closed) == ([1, 2, 3], 1)


@pytest.mark.usefixtures("scoped")
def test_a_logger_is_closed_when_the_run_fails(tiny_model: Path, tmp_path: Path) -> None:
    class Fails(Callback):
        essential = True

        def on_step_end(self) -> None:
            raise ZeroDivisionError

    register("loggers", "memory")(MemoryConfig)
    with pytest.raises(nemorl.NemorlError):
        fit(tiny_model, tmp_path, LoggerCallback("memory"), Fails())
    assert (MEMORY.steps, MEMORY.closed) == ([1], 1)


def test_an_option_that_a_logger_lacks_is_refused_at_once(raises: Raises) -> None:
    with raises(ConfigError, path="fodler"):
        LoggerCallback("tensorboard", fodler="x")
    with raises(PluginNotFoundError, "tensorbord"):
        LoggerCallback("tensorbord")


def test_without_wandb_the_callback_says_what_to_install() -> None:
    with pytest.raises(PluginNotFoundError) as no_plugin, use_registry(Registry(Index([]))):
        WandbCallback()
    assert no_plugin.value.fix == "pip install 'nemorl[insight]'"
    code = """
import sys
sys.modules["wandb"] = None  # as good as not installed
import nemorl
try:
    nemorl.WandbCallback(project="p")
except nemorl.NemorlError as error:
    print(error.fix)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout.strip() == 'pip install "nemorl-insight[wandb]"', done.stderr


@pytest.mark.slow
def test_weights_and_biases_offline(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed (nemorl-insight[wandb])")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    fit(tiny_model, tmp_path / "run", nemorl.WandbCallback(project="nemorl-tests"), max_steps=2)
    (written,) = (tmp_path / "run").glob("wandb/offline-run-*/*.wandb")
    assert written.stat().st_size > 0
    assert (tmp_path / "run/wandb-run-id").read_text().strip() in written.name
