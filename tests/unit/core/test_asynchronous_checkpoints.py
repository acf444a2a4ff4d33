"""Checkpoints that are written while training goes on: seen when they are whole, never before, never lost silently."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import nemorl
import pytest
from nemorl.base.files.jsonl import read_jsonl
from nemorl.base.files.sealed_folders import digest
from nemorl.config.run import CheckpointConfig
from nemorl.errors import CheckpointError, ConfigError
from nemorl.storage.checkpoints import CheckpointManager
from nemorl.trainer import TrainResult
from nemorl_cli.console import Console
from nemorl_rl.callbacks import Callback
from nemorl_tensors.engines import checkpoint_files
from recorded_messages import Raises
from safetensors.torch import load_file

ROWS = [{"prompt": f"{i}+1=", "response": str(i + 1)} for i in range(6)]


class Ranks:
    """One rank that writes when it is told to, in place of a thread."""

    def __init__(self) -> None:
        self.folder: Path
        self.written: dict[str, str] | None = None

    def snapshot(self, folder: Path) -> None:
        self.folder, self.written = folder, None

    def write(self, text: str = "weights") -> None:
        file = self.folder / "model.safetensors"
        file.write_text(text)
        self.written = {str(file): digest(file, sync=True)}

    def files(self, *, wait: bool) -> Mapping[str, str] | None:
        if wait and self.written is None:
            self.write()
        return self.written


def begun(folder: Path, ranks: Ranks, step: int) -> CheckpointManager:
    manager = CheckpointManager(folder, CheckpointConfig(), metric="reward")
    manager.begin(step, {"policy": ranks.snapshot}, {"step": step}, {"reward": 1.0}, [ranks.files])
    return manager


def test_a_checkpoint_appears_when_all_ranks_have_written_theirs(tmp_path: Path) -> None:
    ranks = Ranks()
    manager = begun(tmp_path, ranks, 3)
    assert manager.publish(wait=False) is None
    assert manager.all() == []
    ranks.write()
    checkpoint = manager.publish(wait=False)
    assert checkpoint is not None
    assert manager.all() == [checkpoint]
    checkpoint.verify()
    assert checkpoint.read_state() == {"step": 3}
    assert manager.publish(wait=True) is None  # once


def test_waiting_ends_with_the_checkpoint(tmp_path: Path) -> None:
    checkpoint = begun(tmp_path, Ranks(), 3).publish(wait=True)
    assert checkpoint is not None
    checkpoint.verify()


def test_a_rank_on_another_file_system_is_noticed(tmp_path: Path, raises: Raises) -> None:
    ranks = Ranks()
    manager = begun(tmp_path, ranks, 3)
    ranks.write()
    (ranks.folder / "model.safetensors").unlink()
    with raises(CheckpointError):
        manager.publish(wait=False)
    assert (manager.all(), list(tmp_path.iterdir())) == ([], [])


def test_a_kill_while_ranks_write_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    begun(tmp_path, Ranks(), 3).publish(wait=True)
    ranks = Ranks()
    begun(tmp_path, ranks, 4)
    (ranks.folder / "model.safetensors").write_text("half of the wei")  # and the process is gone
    found = CheckpointManager(tmp_path, CheckpointConfig(), metric="reward")
    assert [checkpoint.step for checkpoint in found.all()] == [3]
    found.repair()
    assert [path.name for path in tmp_path.iterdir()] == ["step_000003"]


def test_what_is_abandoned_leaves_nothing(tmp_path: Path) -> None:
    manager = begun(tmp_path, Ranks(), 3)
    manager.abandon()
    assert list(tmp_path.iterdir()) == []
    assert manager.publish(wait=True) is None


# Runs


def config(model: Path, run_dir: Path, **checkpoint: Any) -> Any:
    return nemorl.load_config(
        {
            "algorithm": "sft",
            "model": str(model),
            "run_dir": str(run_dir),
            "max_steps": 4,
            "batch_size": 2,
            "checkpoint": {"every": 1, "keep_last": 9, "asynchronous": True, "export": False, **checkpoint},
            "policy": {"init": "random", "max_sequence_tokens": 32, "optimizer": {"lr": 1e-3}},
        }
    )


def fit(settings: Any, *callbacks: object, **options: Any) -> TrainResult:
    return settings.build().fit(ROWS, console=Console(quiet=True), callbacks=callbacks, **options)


class AtStep(Callback):
    """Does something when a step has ended, and writes down which checkpoints there are then."""

    def __init__(self, actions: Mapping[int, Callable[[Any], object]]) -> None:
        self.actions, self.seen, self.told = actions, {}, []

    def on_step_end(self, trainer: Any, step: int) -> None:
        if step in self.actions:
            self.actions[step](trainer)
        self.seen[step] = [checkpoint.step for checkpoint in trainer.run.checkpoints.all()]

    def on_checkpoint_saved(self, step: int, path: Path) -> None:
        assert (path / "manifest.json").is_file()
        self.told.append(step)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """A disk that takes nothing from threads until the event is set."""
    ready = threading.Event()

    def slow(path: Path, *, sync: bool = False) -> str:
        assert ready.wait(30)
        return digest(path, sync=sync)

    monkeypatch.setattr(checkpoint_files, "digest", slow)
    return ready


def final_weights(run: Path) -> dict[str, Any]:
    [file] = (run / "checkpoints/step_000004/policy/model").iterdir()
    return load_file(file)


def test_training_goes_on_while_a_checkpoint_is_written(
    tiny_model: Path, tmp_path: Path, disk: threading.Event
) -> None:
    watcher = AtStep({3: lambda _: disk.set()})
    fit(config(tiny_model, tmp_path / "run", every=2), watcher)
    assert watcher.seen[3] == []  # saved after step 2, and on disk some time in the step after
    assert watcher.told == [2, 4]
    times = [record for record in read_jsonl(tmp_path / "run/metrics.jsonl") if "timing/train/checkpointing" in record]
    assert [record["step"] for record in times] == [3, 4]  # copied after step 2, published after step 3
    events = [event["event"] for event in read_jsonl(tmp_path / "run/events.jsonl")]
    assert events[-3:] == ["checkpoint", "checkpoint", "finished"]


@pytest.mark.slow
def test_a_run_that_goes_on_from_an_asynchronous_checkpoint_equals_one_with_the_other_kind(
    tiny_model: Path, tmp_path: Path
) -> None:
    fit(config(tiny_model, tmp_path / "whole", asynchronous=False))
    stop = AtStep({2: lambda trainer: trainer.stop("enough")})
    assert fit(config(tiny_model, tmp_path / "cut"), stop).steps == 2
    assert stop.told == [1, 2]  # the end waited for it
    fit(config(tiny_model, tmp_path / "cut"), resume=True)
    whole, cut = final_weights(tmp_path / "whole"), final_weights(tmp_path / "cut")
    assert all((whole[name] == cut[name]).all() for name in whole)


def test_a_save_waits_for_the_one_before_and_says_so(tiny_model: Path, tmp_path: Path, disk: threading.Event) -> None:
    """The second save finds the first one unfinished: the disk is released by a timer, since that save is to wait."""
    watcher = AtStep({2: lambda _: threading.Timer(0.05, disk.set).start()})
    fit(config(tiny_model, tmp_path / "run"), watcher)
    assert watcher.told == [1, 2, 3, 4]
    waits = {record["step"]: record.get("timing/train/checkpointing/wait") for record in metrics(tmp_path / "run")}
    assert waits[2] is None
    assert waits[3] > 0


def metrics(run: Path) -> list[dict[str, Any]]:
    return list(read_jsonl(run / "metrics.jsonl"))


@pytest.mark.parametrize("last", [False, True])
def test_what_kept_a_thread_from_writing_ends_the_run_at_its_next_step(
    last: bool, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raises: Raises
) -> None:
    def full(path: Path, *, sync: bool = False) -> str:
        if ("step_000004" if last else "step_000002") in str(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return digest(path, sync=sync)

    monkeypatch.setattr(checkpoint_files, "digest", full)
    monkeypatch.chdir(tmp_path)
    with raises(CheckpointError):
        fit(config(tiny_model, Path("run")))
    events = list(read_jsonl(Path("run/events.jsonl")))
    assert "No space left on device" in events[-1]["error"]
    saved = [path.name for path in Path("run/checkpoints").iterdir()]
    assert sorted(saved) == [f"step_00000{step}" for step in ((1, 2, 3) if last else (1,))]


def test_a_run_that_fails_keeps_the_checkpoint_that_was_being_written(tiny_model: Path, tmp_path: Path) -> None:
    class Fails(AtStep):
        essential = True

    def fail(_trainer: Any) -> None:
        raise RuntimeError("a hook's own mistake")

    with pytest.raises(nemorl.errors.NemorlError):
        fit(config(tiny_model, tmp_path / "run", every=2), Fails({3: fail}))
    assert [path.name for path in (tmp_path / "run/checkpoints").iterdir()] == ["step_000002"]


def test_a_backend_that_cannot_is_refused(tiny_model: Path, tmp_path: Path, raises: Raises, monkeypatch: Any) -> None:
    from nemorl_dtensor import DTensorConfig

    monkeypatch.setattr(DTensorConfig, "supports", DTensorConfig.supports - {"asynchronous_checkpoint"})
    with raises(ConfigError):
        config(Path("model"), Path("run"))
