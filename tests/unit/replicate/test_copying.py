"""Runs and checkpoints between places: verified, again after an interruption, and never a part for a whole."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
from nemorl.base.files.checkpoints import Checkpoint
from nemorl.config.run import CheckpointConfig
from nemorl.errors import CheckpointError, StorageError, UsageError
from nemorl.storage.checkpoints import CheckpointManager
from nemorl_cli.pruning import prune
from nemorl_ops.replicate import place as places
from nemorl_ops.replicate.command import app
from nemorl_ops.replicate.config import ReplicateConfig
from nemorl_ops.replicate.place import Place
from nemorl_ops.replicate.transfer import Copied, checkpoints_in, copy_checkpoint
from nemorl_trust.audit.verifying import entries_of
from recorded_messages import Raises
from typer import Typer
from typer.testing import CliRunner

SFT = {"algorithm": "sft", "model": "a", "run_dir": "run", "data": None}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with checkpoints of steps 1, 2 and 3, of which that of step 1 is the best."""
    folder = tmp_path / "run"
    manager = CheckpointManager(folder / "checkpoints", CheckpointConfig(keep_last=5), metric="")
    for step, loss in ((1, 0.1), (2, 0.3), (3, 0.2)):
        metrics = {"validation/val_loss": loss}
        manager.begin(step, {"policy": lambda path: (path / "weights").write_bytes(b"w" * 100) and None}, {}, metrics)
        manager.publish(wait=True)
    (folder / "config.yaml").write_text(json.dumps(SFT))
    (folder / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n')
    (folder / "run.lock").write_text("")
    (folder / "checkpoints/.writing_step_000004").mkdir()
    (folder / "checkpoints/.writing_step_000004/half").write_text("x")
    return folder


def copy(*arguments: object) -> tuple[int, Any]:
    done = CliRunner().invoke(app, [*map(str, arguments), "--json"])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, json.loads(done.stdout)


def test_a_copy_of_a_run_is_that_run_without_what_is_under_way(run: Path, tmp_path: Path) -> None:
    code, facts = copy(run, tmp_path / "copy")
    assert (code, facts["checkpoints"], facts["files"]) == (0, [1, 2, 3], 2 + 3 * 3)
    assert sorted(path.name for path in (tmp_path / "copy").iterdir()) == [
        "checkpoints",
        "config.yaml",
        "metrics.jsonl",
    ]
    for step in (1, 2, 3):
        Checkpoint.read(tmp_path / f"copy/checkpoints/step_00000{step}").verify()
    assert not (tmp_path / "copy/checkpoints/.writing_step_000004").exists()


def test_what_is_there_is_not_sent_again(run: Path, tmp_path: Path) -> None:
    copy(run, tmp_path / "copy", "--checkpoints", "latest")
    damaged = tmp_path / "copy/checkpoints/step_000003/policy/weights"
    damaged.write_bytes(b"v" * 100)  # of the right size
    _, facts = copy(run, tmp_path / "copy", "--checkpoints", "2,3")
    assert facts["already_there"] == 2 + 2
    assert facts["files"] == 3 + 1
    assert damaged.read_bytes() == b"w" * 100


def test_one_checkpoint_is_copied_by_its_folder(run: Path, tmp_path: Path) -> None:
    _, facts = copy(run / "checkpoints/step_000002", f"file://{tmp_path}/archive/step_000002")
    assert facts["checkpoints"] == [2]
    Checkpoint.read(tmp_path / "archive/step_000002").verify()


def test_an_interrupted_copy_is_no_checkpoint_and_is_completed(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = (Place(str(folder / "checkpoints/step_000003")) for folder in (run, tmp_path / "copy"))
    original = Place.write

    def cut(self: Place, name: str, pieces: Any, seen: Any) -> str:
        if name == "trainer.json":
            raise StorageError("the line is dead")
        return original(self, name, pieces, seen)

    monkeypatch.setattr(Place, "write", cut)
    with pytest.raises(StorageError, match="dead"):
        copy_checkpoint(source, target, Copied())
    assert checkpoints_in(Place(str(tmp_path / "copy"))) == {}
    monkeypatch.undo()
    copied = Copied()
    copy_checkpoint(source, target, copied)
    assert (copied.files, copied.same) == (2, 1)
    assert list(checkpoints_in(Place(str(tmp_path / "copy")))) == ["step_000003"]


def test_what_arrives_otherwise_than_it_was_sent_is_removed(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raises: Raises
) -> None:
    source = Place(str(run / "checkpoints/step_000003"))
    monkeypatch.chdir(tmp_path)
    original = places.Place.digest
    target = Place("copy")
    monkeypatch.setattr(Place, "digest", lambda self, name: "0" if self is target else original(self, name))
    with raises(StorageError):
        copy_checkpoint(source, target, Copied())
    assert not list(Path("copy").rglob("weights"))


def test_a_file_that_grows_while_it_is_copied_is_copied_as_far_as_it_was_read(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Place.pieces

    def growing(self: Place, name: str) -> Any:
        if name == "metrics.jsonl" and self.url == str(run):  # by a run that is under way
            with (run / name).open("a") as file:
                file.write('{"step": 4}\n')
        return original(self, name)

    monkeypatch.setattr(Place, "pieces", growing)
    assert copy(run, tmp_path / "copy")[0] == 0
    assert (tmp_path / "copy/metrics.jsonl").read_text().count("step") == 4


def test_damage_at_the_source_is_not_copied(run: Path, tmp_path: Path, monkeypatch: Any, raises: Raises) -> None:
    monkeypatch.chdir(tmp_path)
    (run / "checkpoints/step_000003/policy/weights").write_bytes(b"v" * 100)
    with raises(StorageError):
        copy("run", tmp_path / "copy")
    (run / "checkpoints/step_000003/manifest.json").write_text("{}")
    with raises(CheckpointError):
        copy("run/checkpoints/step_000003", tmp_path / "copy")


@pytest.mark.parametrize(
    "arguments",
    [
        ("nowhere", "copy"),
        ("run", "ftpp://x/y"),
        ("run", "copy", "--checkpoints", "7"),
        ("run", "copy", "--checkpoints", "x"),
    ],
)
def test_what_cannot_be_copied_is_said(arguments: tuple[str, ...], run: Path, monkeypatch: Any, raises: Raises) -> None:
    monkeypatch.chdir(run.parent)
    with raises(UsageError):
        copy(*arguments)


# What somebody may have put into a bucket


@pytest.mark.parametrize("name", ["../../stolen", "/stolen", "a/../../../stolen", "./a", "a//b"])
def test_a_manifest_leads_to_no_file_outside(run: Path, tmp_path: Path, name: str, raises: Raises) -> None:
    path = run / "checkpoints/step_000003/manifest.json"
    manifest = json.loads(path.read_text())
    manifest["files"][name] = hashlib.sha256(b"evil").hexdigest()
    content = {key: value for key, value in manifest.items() if key != "sha256"}  # sealed anew: it is no signature
    content["sha256"] = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps(content))
    code, facts = copy(run, tmp_path / "copy")
    assert (code, facts["checkpoints"]) == (0, [1, 2]), "it is no checkpoint"
    with raises(CheckpointError):
        copy(path.parent, tmp_path / "alone")
    assert {each.name for each in tmp_path.iterdir()} <= {"run", "copy", "alone"}


def test_a_key_of_a_store_leads_to_no_file_outside(tmp_path: Path, raises: Raises) -> None:
    for name in ("../stolen", "checkpoints/../../stolen", "/etc/stolen"):
        with raises(StorageError, name, varies=r"/\S+(?= names)"):
            Place(str(tmp_path / "here")).write(name, iter([b"evil"]), print)
    assert [*tmp_path.iterdir()] == []


def test_a_copy_is_in_the_audit_log(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEMORL_AUDIT", str(tmp_path / "audit"))
    copy(run, tmp_path / "copy", "--checkpoints", "latest")
    (log,) = (tmp_path / "audit").glob("*.jsonl")
    (entry,) = entries_of(log)
    assert (entry.event, entry.facts["to"], entry.facts["checkpoints"]) == ("weights_copied", f"{tmp_path}/copy", [3])


def test_weights_go_to_no_other_machine_in_plain_text(run: Path, raises: Raises) -> None:
    with raises(UsageError, "http://node7:9000"):
        copy(run, "s3://bucket/run", "--endpoint", "http://node7:9000")
    with raises(ValueError, path="options.client_kwargs.endpoint_url"):
        ReplicateConfig(to="s3://bucket", options={"client_kwargs": {"endpoint_url": "http://node7:9000"}})


# nemorl runs prune

PRUNE = Typer()
PRUNE.command()(prune)


def pruned(*arguments: object) -> Any:
    done = CliRunner().invoke(PRUNE, [*map(str, arguments), "--json"])
    if done.exception is not None:
        raise done.exception
    return json.loads(done.stdout)


def test_a_rehearsal_of_pruning_removes_nothing(run: Path) -> None:
    found = pruned(run, "--keep", 1, "--dry-run")
    # Kept: 3, the newest, and 1, whose loss is the lowest.
    assert (found["would_remove"], found["kept"]) == (["step_000002"], ["step_000001", "step_000003"])
    assert found["bytes"] == sum(path.stat().st_size for path in (run / "checkpoints/step_000002").rglob("*.*")) + 100
    assert (run / "checkpoints/step_000002").is_dir()
    assert (run / "checkpoints/.writing_step_000004").is_dir()


def test_pruning_keeps_what_the_options_say(run: Path) -> None:
    assert pruned(run, "--keep", 1, "--keep-best", 0, "--keep-every", 2)["removed"] == ["step_000001"]
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step_000002", "step_000003"]


def test_a_person_sees_what_goes(run: Path) -> None:
    done = CliRunner().invoke(PRUNE, [str(run), "--keep", "1", "--dry-run"])
    assert "would go" in done.stdout
    assert "would free 0.000 GiB" in done.stdout


def test_a_folder_that_the_disk_does_not_list_is_no_empty_one(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raises: Raises
) -> None:
    list_folder = os.scandir

    def refused(path: Any) -> Any:
        if str(path).endswith("step_000002"):
            raise OSError(errno.EIO, "Input/output error", str(path))
        return list_folder(path)

    monkeypatch.setattr(os, "scandir", refused)
    with raises(StorageError, "step_000002"):
        copy(run, tmp_path / "copy")
