"""The hook ``replicate`` on a second folder: what is there after a run, what is kept, and what goes on from it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import nemorl
import pytest
from nemorl.base.files.checkpoints import Checkpoint
from nemorl.base.files.jsonl import read_jsonl
from nemorl.errors import ConfigError, StorageError, UsageError
from nemorl.trainer import TrainResult
from nemorl_cli.console import Console
from nemorl_ops.replicate import sender
from nemorl_ops.replicate.place import Place
from recorded_messages import Raises
from safetensors.torch import load_file

ROWS = [{"prompt": f"{i}+1=", "response": str(i + 1)} for i in range(6)]


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sender, "FIRST_PAUSE_S", 0.01)


def config(model: Path, run_dir: Path, to: str, *, steps: int = 3, lr: float = 1e-3, **hook: Any) -> Any:
    return nemorl.load_config(
        {
            "algorithm": "sft",
            "model": str(model),
            "run_dir": str(run_dir),
            "max_steps": steps,
            "batch_size": 2,
            "checkpoint": {"every": 1, "keep_last": 2, "keep_best": 0, "export": False},
            "policy": {"init": "random", "max_sequence_tokens": 32, "optimizer": {"lr": lr}},
            "plugins": {"hooks": [{"name": "replicate", "to": to, **hook}]},
        }
    )


def fit(settings: Any, **options: Any) -> TrainResult:
    return settings.build().fit(ROWS, console=Console(quiet=True), **options)


def events(run: Path, name: str) -> list[dict[str, Any]]:
    return [event for event in read_jsonl(run / "events.jsonl") if event["event"] == name]


def weights(run: Path, step: int) -> dict[str, Any]:
    [file] = (run / f"checkpoints/step_{step:06d}/policy/model").iterdir()
    return load_file(file)


@pytest.mark.slow
def test_a_run_leaves_a_second_one_that_is_kept_as_it_is(tiny_model: Path, tmp_path: Path) -> None:
    fit(config(tiny_model, tmp_path / "run", f"file://{tmp_path}/replicas"))
    replica = tmp_path / "replicas/run"
    found = sorted(path.name for path in (replica / "checkpoints").iterdir())
    assert found == ["step_000002", "step_000003"] == sorted(p.name for p in (tmp_path / "run/checkpoints").iterdir())
    for name in found:
        Checkpoint.read(replica / "checkpoints" / name).verify()
    assert {event["step"] for event in events(tmp_path / "run", "replicated")} >= {2, 3}
    last = list(read_jsonl(tmp_path / "run/metrics.jsonl"))[-1]
    assert last["replication/failures"] == 0
    assert 0 <= last["replication/behind_steps"] <= 2


@pytest.mark.slow
def test_a_run_whose_folder_is_gone_continues_from_the_replica(tiny_model: Path, tmp_path: Path) -> None:
    to = f"file://{tmp_path}/replicas"
    whole = fit(config(tiny_model, tmp_path / "whole/run", f"file://{tmp_path}/other", steps=4))
    fit(config(tiny_model, tmp_path / "run", to, steps=2))
    shutil.rmtree(tmp_path / "run")
    found = fit(config(tiny_model, tmp_path / "run", to, steps=4, resume=True))
    assert [record["step"] for record in read_jsonl(tmp_path / "run/metrics.jsonl")] == [1, 2, 3, 4]
    assert found.history[0]["step"] == 3
    one, other = weights(whole.run_dir, 4), weights(tmp_path / "run", 4)
    assert all((one[name] == other[name]).all() for name in one)


@pytest.mark.slow
def test_what_was_saved_and_not_sent_before_a_kill_is_sent_by_the_next_life(tiny_model: Path, tmp_path: Path) -> None:
    settings = config(tiny_model, tmp_path / "run", f"file://{tmp_path}/replicas", steps=2)
    fit(settings)
    unsent = tmp_path / "replicas/run/checkpoints/step_000002"
    shutil.rmtree(unsent)
    fit(settings, resume=True)  # nothing is left to train, hence to save
    Checkpoint.read(unsent).verify()
    assert [event["step"] for event in events(tmp_path / "run", "replicated")] == [1, 2, 2]


@pytest.mark.slow
def test_a_damaged_replica_is_passed_over(tiny_model: Path, tmp_path: Path) -> None:
    to = f"file://{tmp_path}/replicas"
    fit(config(tiny_model, tmp_path / "run", to))
    shutil.rmtree(tmp_path / "run")
    (tmp_path / "replicas/run/checkpoints/step_000003/policy/optimizer.json").write_text("{}")
    result = fit(config(tiny_model, tmp_path / "run", to, steps=4, resume=True))
    assert result.history[0]["step"] == 3
    assert "does not match its checksum" in events(tmp_path / "run", "warning")[0]["message"]


@pytest.mark.slow
def test_a_run_whose_checkpoints_are_damaged_continues_from_the_replica(tiny_model: Path, tmp_path: Path) -> None:
    to = f"file://{tmp_path}/replicas"
    fit(config(tiny_model, tmp_path / "run", to, steps=2))
    damaged = sorted((tmp_path / "run/checkpoints").glob("step_*"))
    for checkpoint in damaged:
        (checkpoint / "manifest.json").write_text("{}")
    found = fit(config(tiny_model, tmp_path / "run", to, steps=3, resume=True), resume=True)
    assert [record["step"] for record in found.history] == [3]
    assert [record["step"] for record in read_jsonl(tmp_path / "run/metrics.jsonl")] == [1, 2, 3]
    aside = tmp_path / "run/set_aside/001_from_step_2/checkpoints"
    assert sorted(path.name for path in aside.iterdir()) == [path.name for path in damaged]


def test_a_replica_of_another_run_is_neither_continued_nor_mixed(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raises: Raises
) -> None:
    monkeypatch.chdir(tmp_path)
    to = f"file://{tmp_path}/replicas"
    fit(config(tiny_model, Path("run"), to, steps=1))
    shutil.rmtree("run")
    with raises(UsageError):
        fit(config(tiny_model, Path("run"), to, steps=1))
    shutil.rmtree("run")
    with raises(ConfigError):
        fit(config(tiny_model, Path("run"), to, steps=1, lr=1e-2, resume=True))


def test_training_goes_on_where_nothing_can_be_copied(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(self: Place, name: str, *_: Any) -> str:
        raise StorageError(f"{self.url}/{name}: the store is closed")

    monkeypatch.setattr(Place, "write", refused)
    assert fit(config(tiny_model, tmp_path / "run", f"file://{tmp_path}/replicas", attempts=2)).steps == 3
    said = [event["message"] for event in events(tmp_path / "run", "warning")]
    assert any("the checkpoint of step 3 has no copy" in text and "the store is closed" in text for text in said)
    assert events(tmp_path / "run", "replicated") == []


def test_a_copy_that_fails_once_is_tried_again(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, failures = Place.write, iter([True])

    def write(self: Place, name: str, *rest: Any) -> str:
        if name.endswith("trainer.json") and next(failures, False):
            raise StorageError("once")
        return original(self, name, *rest)

    monkeypatch.setattr(Place, "write", write)
    fit(config(tiny_model, tmp_path / "run", f"file://{tmp_path}/replicas", steps=1))
    assert [event["step"] for event in events(tmp_path / "run", "replicated")] == [1]


def test_a_checkpoint_that_is_pruned_before_its_turn_is_said_to_be(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = sender.Sender._copy

    def late(self: sender.Sender, path: Path) -> None:
        if path.name == "step_000001":
            shutil.rmtree(path)
        original(self, path)

    monkeypatch.setattr(sender.Sender, "_copy", late)
    fit(config(tiny_model, tmp_path / "run", f"file://{tmp_path}/replicas", steps=2))
    said = [event["message"] for event in events(tmp_path / "run", "warning")]
    assert said == ["the checkpoint of step 1 has no copy: it was pruned before it was sent"]
    assert [event["step"] for event in events(tmp_path / "run", "replicated")] == [2]


@pytest.mark.parametrize(
    "hook",
    [
        {"to": "/mnt/replicas"},
        {"to": "s3://bucket", "options": {"key": "AKIA", "client_kwargs": {"aws_secret_access_key": "planted"}}},
    ],
)
def test_mistakes_of_the_config_are_said(hook: dict[str, Any], raises: Raises) -> None:
    with raises(ConfigError) as caught:
        config(Path("model"), Path("run"), **hook)
    assert "planted" not in json.dumps(str(caught.value))
