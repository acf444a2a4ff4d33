"""Checkpoints survive a kill at any moment, notice damage and keep the right ones."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from nemorl.base.files import sealed_folders
from nemorl.base.files.checkpoints import Checkpoint
from nemorl.base.files.sealed_folders import MANIFEST
from nemorl.config.run import CheckpointConfig
from nemorl.errors import CheckpointError, StorageError
from nemorl.storage.checkpoints import CheckpointManager
from nemorl.storage.run_directory import has_progress
from recorded_messages import Raises


def manager(folder: Path, **settings: Any) -> CheckpointManager:
    return CheckpointManager(
        folder, CheckpointConfig(**{"keep_last": 100, **settings}), metric="validation/accuracy", higher_is_better=True
    )


def reopened(folder: Path) -> CheckpointManager:
    """As the next owner of the run finds it."""
    saver = manager(folder)
    saver.repair()
    return saver


def write(text: str = "weights") -> Callable[[Path], None]:
    def fill(folder: Path) -> None:
        (folder / "model.safetensors").write_text(text)
        (folder / "optimizer").mkdir()
        (folder / "optimizer/state.json").write_text("{}")

    return fill


def save(saver: CheckpointManager, step: int, accuracy: float | None = None, text: str = "weights") -> Checkpoint:
    metrics = {} if accuracy is None else {"validation/accuracy": accuracy}
    return saved(saver, step, {"policy": write(text)}, {"step": step}, metrics)


def saved(saver: CheckpointManager, *content: Any) -> Checkpoint:
    """Begun, and published at once."""
    saver.begin(*content)
    found = saver.publish(wait=True)
    assert found is not None
    return found


def steps(saver: CheckpointManager) -> list[int]:
    return [checkpoint.step for checkpoint in saver.all()]


def test_a_checkpoint_is_a_folder_with_everything_in_it(tmp_path: Path) -> None:
    checkpoint = save(manager(tmp_path), 3, accuracy=0.5)
    assert checkpoint.path == tmp_path / "step_000003"
    names = sorted(str(path.relative_to(checkpoint.path)) for path in checkpoint.path.rglob("*") if path.is_file())
    assert names == ["manifest.json", "policy/model.safetensors", "policy/optimizer/state.json", "trainer.json"]
    assert checkpoint.read_state() == {"step": 3}
    checkpoint.verify()
    assert manager(tmp_path).latest() == checkpoint


def test_no_checkpoints_are_no_error(tmp_path: Path) -> None:
    empty = manager(tmp_path / "none")
    assert (empty.all(), empty.latest(), empty.best()) == ([], None, None)


def test_steps_are_ordered_by_number_not_by_name(tmp_path: Path) -> None:
    saver = manager(tmp_path)
    for step in (999_999, 1_000_000, 5):
        save(saver, step)
    assert steps(saver) == [5, 999_999, 1_000_000]
    assert saver.latest() is not None
    assert saver.latest().step == 1_000_000  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("damage", "facts"),
    [
        (lambda path: (path / "policy/model.safetensors").write_text("weighty"), ["policy/model.safetensors"]),
        (lambda path: (path / "policy/model.safetensors").write_text(""), ["policy/model.safetensors"]),
        (lambda path: (path / "trainer.json").unlink(), ["trainer.json"]),
        (lambda path: (path / MANIFEST).write_text("{"), ["manifest"]),
        (lambda path: (path / MANIFEST).write_text('{"format": 99}'), [99, 1]),
    ],
    ids=["one letter", "emptied", "file gone", "manifest cut", "newer format"],
)
def test_damage_is_noticed_and_named(
    tmp_path: Path, damage: Callable[[Path], Any], facts: list[object], raises: Raises
) -> None:
    checkpoint = save(manager(tmp_path), 3)
    damage(checkpoint.path)
    with raises(CheckpointError, *facts, "fix:"):
        checkpoint.verify()


def change(path: Path, **entries: Any) -> None:
    """Set top-level entries of a JSON file."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **entries}))


MANIFESTS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no JSON": (lambda path: path.write_text("{"), "no readable manifest"),
    "no UTF-8": (lambda path: path.write_bytes(b"\xff{}"), "no readable manifest"),
    "too deep": (lambda path: path.write_text("[" * 100_000), "no readable manifest"),
    "a list": (lambda path: path.write_text("[1, 2]"), "no readable manifest: a list"),
    "a number": (lambda path: path.write_text("3"), "no readable manifest: a int"),
    "of another format": (lambda path: change(path, format=99), "format 99, this nemorl reads 1"),
    "step of a text": (lambda path: change(path, step="3"), "damaged or edited"),
    "files of a list": (lambda path: change(path, files=[]), "damaged or edited"),
    "a metric turned": (lambda path: change(path, metrics={"validation/accuracy": 1.0}), "damaged or edited"),
    "a metric that is none": (lambda path: change(path, metrics={"validation/accuracy": float("nan")}), "damaged"),
    "a metric of many digits": (lambda path: change(path, metrics={"validation/accuracy": 10**400}), "damaged"),
    "a folder": (lambda path: (path.unlink(), path.mkdir()), "no readable manifest"),
    "gone": (Path.unlink, "no readable manifest"),
}


@pytest.mark.parametrize(("damage", "words"), MANIFESTS.values(), ids=MANIFESTS)
@pytest.mark.parametrize("step", [3, 4], ids=["the older one", "the newer one"])
def test_a_checkpoint_with_a_bad_manifest_hides_no_other(
    tmp_path: Path, damage: Callable[[Path], Any], words: str, step: int
) -> None:
    saver = manager(tmp_path)
    for number in (3, 4):
        save(saver, number, 0.5)
    damage(tmp_path / f"step_00000{step}" / MANIFEST)
    assert steps(saver) == [7 - step]
    assert saver.latest() == saver.best() == saver.of_step(7 - step)
    ((path, reason),) = saver.damaged().items()
    assert (path.name, words in reason) == (f"step_00000{step}", True), reason
    with pytest.raises(CheckpointError) as caught:
        saver.of_step(step)
    assert str(caught.value.fix) == f"choose another step: there are {7 - step}"


def test_a_checkpoint_under_the_name_of_another_step_is_none(tmp_path: Path) -> None:
    saver = manager(tmp_path)
    save(saver, 3).path.rename(tmp_path / "step_000009")
    assert steps(saver) == []
    assert list(saver.damaged().values()) == [f"{tmp_path / 'step_000009'} holds the checkpoint of step 3"]


def test_a_file_that_the_manifest_does_not_name_is_noticed(tmp_path: Path, raises: Raises) -> None:
    checkpoint = save(manager(tmp_path), 3)
    foreign = checkpoint.path / "policy/more.safetensors"
    for put in (lambda: foreign.write_text("a backend would read it"), lambda: foreign.symlink_to(tmp_path)):
        put()
        with raises(CheckpointError, "policy/more.safetensors"):
            checkpoint.verify()
        foreign.unlink()


def test_a_manifest_of_an_earlier_version_without_its_own_hash_is_read(tmp_path: Path) -> None:
    checkpoint = save(manager(tmp_path), 3, 0.5)
    manifest = json.loads((checkpoint.path / MANIFEST).read_text())
    del manifest["sha256"]
    (checkpoint.path / MANIFEST).write_text(json.dumps(manifest))
    checkpoint.verify()
    assert manager(tmp_path).all() == [checkpoint]


def test_of_a_linked_checkpoint_only_the_link_is_ever_removed(tmp_path: Path) -> None:
    elsewhere = save(manager(tmp_path / "elsewhere"), 1).path
    saver = manager(tmp_path / "run", keep_last=1, keep_best=0)
    saver.folder.mkdir()
    (saver.folder / "step_000001").symlink_to(elsewhere)
    saver.of_step(1).verify()
    save(saver, 1)  # replaces it
    (saver.folder / "step_000002").symlink_to(elsewhere)
    assert list(saver.damaged()) == [saver.folder / "step_000002"]
    (saver.folder / "step_000002").unlink()
    save(saver, 1).path.rename(tmp_path / "moved")
    (saver.folder / "step_000001").symlink_to(tmp_path / "moved")
    save(saver, 5)  # prunes it
    assert sorted(path.name for path in saver.folder.iterdir()) == ["step_000005"]
    Checkpoint.read(elsewhere).verify()
    assert (tmp_path / "moved" / MANIFEST).is_file()


def test_a_file_in_place_of_the_folder_is_told(tmp_path: Path, raises: Raises) -> None:
    (tmp_path / "checkpoints").write_text("")
    with raises(CheckpointError):
        manager(tmp_path / "checkpoints").latest()


def test_one_who_only_reads_repairs_nothing(tmp_path: Path) -> None:
    # The owner is between two renames: the reader must not take what is on its way for litter.
    save(manager(tmp_path), 1).path.rename(tmp_path / ".replaced_step_000001")
    (tmp_path / ".writing_step_000001").mkdir()
    assert steps(manager(tmp_path)) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == [".replaced_step_000001", ".writing_step_000001"]
    assert steps(reopened(tmp_path)) == [1]
    assert [path.name for path in tmp_path.iterdir()] == ["step_000001"]


def test_a_folder_without_a_manifest_is_no_checkpoint(tmp_path: Path) -> None:
    saver = manager(tmp_path)
    save(saver, 3)
    (save(saver, 4).path / MANIFEST).unlink()
    assert steps(saver) == [3]


def test_the_newest_and_the_best_are_kept(tmp_path: Path) -> None:
    saver = manager(tmp_path, keep_last=2, keep_best=1)
    kept = []
    for step, accuracy in enumerate([0.1, 0.9, 0.3, 0.4, 0.9, 0.5, 0.2], 1):
        save(saver, step, accuracy)
        kept.append(steps(saver))
    # 2 is the best until 5 ties with it and is newer.
    assert kept == [[1], [1, 2], [2, 3], [2, 3, 4], [4, 5], [5, 6], [5, 6, 7]]
    assert saver.best() is not None
    assert saver.best().step == 5  # type: ignore[union-attr]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000005", "step_000006", "step_000007"]


def test_every_nth_is_kept_for_good(tmp_path: Path) -> None:
    saver = manager(tmp_path, keep_last=1, keep_best=1, keep_every=4)
    for step in range(1, 12):
        save(saver, step, accuracy=1 / step)
    assert steps(saver) == [1, 4, 8, 11]  # the best, multiples of 4, the last


def test_nothing_to_write_but_the_state_is_a_checkpoint_too(tmp_path: Path) -> None:
    checkpoint = saved(manager(tmp_path), 1, {}, {"step": 1}, {})
    checkpoint.verify()
    assert checkpoint.read_state() == {"step": 1}


def test_lower_may_be_better(tmp_path: Path) -> None:
    saver = manager(tmp_path, keep_last=1, keep_best=2, metric="validation/accuracy", higher_is_better=False)
    for step, loss in enumerate([0.3, 0.1, 0.2, 0.9], 1):
        save(saver, step, loss)
    assert steps(saver) == [2, 3, 4]
    assert saver.best().step == 2  # type: ignore[union-attr]


@pytest.mark.parametrize(("higher_is_better", "best"), [(True, 1), (False, 2)])
def test_the_config_may_rank_by_another_metric(tmp_path: Path, higher_is_better: bool, best: int) -> None:
    saver = manager(tmp_path, metric="train/reward", higher_is_better=higher_is_better)
    saved(saver, 1, {"policy": write()}, {}, {"train/reward": 9.0, "validation/accuracy": 0.1})
    saved(saver, 2, {"policy": write()}, {}, {"train/reward": 1.0, "validation/accuracy": 0.2})
    saved(saver, 3, {"policy": write()}, {}, {"validation/accuracy": 0.3})
    assert saver.best().step == best  # type: ignore[union-attr]


def test_without_the_metric_the_latest_is_the_best(tmp_path: Path) -> None:
    saver = manager(tmp_path, keep_last=2, keep_best=3)
    for step in (1, 2, 3):
        save(saver, step)
    assert steps(saver) == [2, 3]
    assert saver.best().step == 3  # type: ignore[union-attr]


def test_a_metric_that_is_no_number_does_not_rank(tmp_path: Path) -> None:
    saver = manager(tmp_path)
    save(saver, 1, 0.5)
    save(saver, 2, float("nan"))
    assert saver.best().step == 1  # type: ignore[union-attr]
    assert json.loads((tmp_path / "step_000002" / MANIFEST).read_text())["metrics"] == {}


def test_a_step_saved_again_replaces_the_first(tmp_path: Path) -> None:
    saver = manager(tmp_path)
    save(saver, 1, text="first")
    checkpoint = save(saver, 1, text="second")
    checkpoint.verify()
    assert (checkpoint.path / "policy/model.safetensors").read_text() == "second"
    assert steps(saver) == [1]


def test_a_full_disk_is_told_and_leaves_nothing_behind(tmp_path: Path, raises: Raises) -> None:
    class RanksFailed(BaseException):
        """As torch's: it is no Exception, and the cause is below it."""

    def full(folder: Path) -> None:
        (folder / "part").write_text("x")
        try:
            raise OSError(28, "No space left on device")
        except OSError as error:
            raise RanksFailed("rank 0") from error

    saver = manager(tmp_path)
    save(saver, 1)
    with raises(CheckpointError, "step_000002", "No"):
        saved(saver, 2, {"policy": full}, {}, {})
    assert [path.name for path in tmp_path.iterdir()] == ["step_000001"]


def test_a_writer_that_fails_for_another_reason_is_not_taken_for_a_full_disk(tmp_path: Path) -> None:
    def broken(folder: Path) -> None:
        (folder / "gone/file").write_text("x")

    with pytest.raises(FileNotFoundError):
        saved(manager(tmp_path), 2, {"policy": broken}, {}, {})
    assert not list(tmp_path.iterdir())


def killed(action: Callable[[], None]) -> None:
    """Run ``action`` in a child process that is expected to die inside it."""
    child = os.fork()
    if child == 0:  # pragma: no cover - measured in no process that returns
        try:
            action()
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9, "the child was to be killed"


def die(*_: object, **__: object) -> None:
    os._exit(9)


@pytest.mark.parametrize("at", [f"{sealed_folders.__name__}._write_synced", "os.rename", "shutil.rmtree", "os.fsync"])
@pytest.mark.parametrize("step", [1, 2])
def test_a_kill_while_saving_leaves_the_previous_state(
    tmp_path: Path, at: str, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    saver = manager(tmp_path)
    save(saver, 1, text="first")

    def action() -> None:
        monkeypatch.setattr(at, die)
        save(saver, step, text="second")

    killed(action)
    monkeypatch.undo()
    saver = reopened(tmp_path)
    assert [(c.step, (c.path / "policy/model.safetensors").read_text()) for c in saver.all()] == [(1, "first")]
    for checkpoint in saver.all():
        checkpoint.verify()
    # And the next attempt cleans up.
    save(saver, step, text="third").verify()
    assert not list(tmp_path.glob(".writing_*"))


def test_a_kill_inside_the_backend_leaves_the_previous_state(tmp_path: Path) -> None:
    saver = manager(tmp_path)
    save(saver, 1)
    killed(lambda: saved(saver, 2, {"policy": die}, {}, {}) and None)
    assert steps(saver) == [1]
    assert steps(manager(tmp_path)) == [1]


def test_a_kill_between_the_two_renames_of_a_replacement_is_undone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saver = manager(tmp_path)
    save(saver, 1, text="first")
    rename = os.rename

    def second_dies(source: Path, target: Path) -> None:
        rename(source, target) if source.name == "step_000001" else die()

    def action() -> None:
        monkeypatch.setattr("os.rename", second_dies)
        save(saver, 1, text="second")

    killed(action)
    (checkpoint,) = reopened(tmp_path).all()
    checkpoint.verify()
    assert (checkpoint.path / "policy/model.safetensors").read_text() == "first"


def test_a_kill_after_a_replacement_keeps_the_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saver = manager(tmp_path)
    save(saver, 1, text="first")

    def half(path: Path, **_: object) -> None:
        if path.name == ".replaced_step_000001":
            (path / "policy/model.safetensors").unlink()
            die()

    def action() -> None:
        monkeypatch.setattr("shutil.rmtree", half)
        save(saver, 1, text="second")

    killed(action)
    (checkpoint,) = reopened(tmp_path).all()
    checkpoint.verify()
    assert (checkpoint.path / "policy/model.safetensors").read_text() == "second"
    assert [path.name for path in tmp_path.iterdir()] == ["step_000001"]


def test_what_cannot_be_removed_ends_no_run_and_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saver = manager(tmp_path, keep_last=1, keep_best=0)
    save(saver, 1)

    def refuses(*_: object, **__: object) -> None:
        raise OSError(errno.EBADF, "Bad file descriptor")  # as rmtree of Python 3.11, also with ignore_errors

    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", refuses)
        save(saver, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".removed_step_000001", "step_000002"]
    save(saver, 3)
    assert [path.name for path in tmp_path.iterdir()] == ["step_000003"]


def test_an_old_checkpoint_that_cannot_be_moved_away_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saver = manager(tmp_path, keep_last=1, keep_best=0)
    save(saver, 1)

    def refuses(source: Path, target: Path) -> None:
        if ".removed_" in str(target):
            raise OSError(errno.EBUSY, "Device or resource busy")  # as NFS does while a file is open
        rename(source, target)

    rename = os.rename
    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", refuses)
        assert save(saver, 2).step == 2
    assert steps(saver) == [1, 2]
    save(saver, 3)
    assert steps(saver) == [3]


def test_what_is_left_of_a_removed_checkpoint_is_no_obstacle_to_removing_its_namesake(tmp_path: Path) -> None:
    saver = manager(tmp_path, keep_last=1, keep_best=0)
    save(saver, 1)
    (tmp_path / ".removed_step_000001" / "rest").mkdir(parents=True)
    save(saver, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["step_000002"]


def test_a_checkpoint_that_the_disk_does_not_give_is_a_damaged_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raises: Raises
) -> None:
    checkpoint = save(manager(tmp_path), 1)

    def fails(path: Path, *_: object) -> None:
        raise OSError(errno.EIO, "Input/output error", str(path))

    monkeypatch.setattr("nemorl.base.files.sealed_folders.digest", fails)
    with raises(CheckpointError, "model.safetensors"):
        checkpoint.verify()


def test_a_disk_that_does_not_list_checkpoints_starts_no_run_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saver = manager(tmp_path / "checkpoints")
    save(saver, 1)
    assert has_progress(tmp_path)

    def fails(path: Path) -> list[str]:
        raise OSError(errno.EIO, "Input/output error", str(path))

    monkeypatch.setattr(os, "listdir", fails)
    for ask in (saver.all, saver.best, saver.damaged, saver.prune, saver.repair, partial(has_progress, tmp_path)):
        with pytest.raises(StorageError, match="checkpoints:"):
            ask()
