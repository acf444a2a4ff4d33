"""Files are replaced as a whole or not at all, and a disk that refuses is named however deep the cause is buried."""

from __future__ import annotations

import errno
import os
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from nemorl.base.files.atomic import listed, replace_text, replacing, replacing_folder, storage_errno, storing
from nemorl.errors import CheckpointError, StorageError
from recorded_messages import Raises

ROOT = Path(__file__).parents[3]


def test_a_file_keeps_its_content_when_the_next_does_not_fit(
    tmp_path: Path, small_files_only: Any, raises: Raises
) -> None:
    path = tmp_path / "config.yaml"
    replace_text(path, "old")
    with small_files_only(1000), raises(StorageError, "config.yaml"):
        replace_text(path, "x" * 2000)
    assert path.read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["config.yaml"]


def test_a_reader_sees_the_old_content_until_the_new_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with replacing(path) as file:
        file.write(b"ne")
        file.flush()
        assert path.read_bytes() == b"old"
        file.write(b"w")
    assert path.read_bytes() == b"new"


def test_what_a_link_leads_to_is_replaced_not_the_link(tmp_path: Path) -> None:
    (tmp_path / "there").write_text("old")
    (tmp_path / "link").symlink_to("there")
    replace_text(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "there").read_text() == "new"


def test_what_is_no_ordinary_file_is_written_to(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    replace_text(tmp_path / "pipe", "through")
    assert os.read(reader, 100) == b"through"
    os.close(reader)


def test_a_new_file_is_readable_by_whom_the_umask_lets(tmp_path: Path) -> None:
    mask = os.umask(0o027)
    try:
        replace_text(tmp_path / "file", "text")
    finally:
        os.umask(mask)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o640


def test_a_folder_is_replaced_whole_or_not_at_all(tmp_path: Path, small_files_only: Any, raises: Raises) -> None:
    model = tmp_path / "model"
    for name in ("first", "second"):
        with replacing_folder(model) as draft:
            draft.mkdir()
            (draft / name).write_text(name)

    def too_large() -> None:
        with replacing_folder(model) as draft:
            draft.mkdir()
            (draft / "third").write_text("x" * 2000)

    with small_files_only(1000), raises(StorageError, "model"):
        too_large()
    assert [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")] == ["model", "model/second"]


def test_a_folder_that_could_not_be_replaced_keeps_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raises: Raises
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "first").write_text("first")
    rename = Path.rename

    def refuses(path: Path, target: Path) -> Path:
        if path.name.startswith(".writing_"):
            raise OSError(errno.EIO, "Input/output error")
        return rename(path, target)

    def replaced() -> None:
        with replacing_folder(model) as draft:
            draft.mkdir()

    with monkeypatch.context() as patch, raises(StorageError, "model"):
        patch.setattr(Path, "rename", refuses)
        replaced()
    model.rename(tmp_path / ".replaced_model")  # as a kill between the two renames leaves it
    with raises(KeyError), replacing_folder(model):
        raise KeyError("of the writer")
    assert [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")] == ["model", "model/first"]


class Wrapped(BaseException):
    """As torch's: no Exception."""


def test_the_cause_is_found_however_deep() -> None:
    def buried() -> BaseException:
        try:
            try:
                raise OSError(28, "No space left on device")
            except OSError as error:
                raise Wrapped("ranks failed") from error
        except Wrapped:
            try:
                raise CheckpointError("cannot save")
            except CheckpointError as error:
                return ExceptionGroup("several", [ValueError("x"), error])

    assert storage_errno(buried()) == 28
    assert storage_errno(RuntimeError("I/O error: No space left on device (os error 28)")) == 28
    assert storage_errno(FileNotFoundError(2, "No such file or directory")) is None
    assert storage_errno(RuntimeError("no space for a joke")) is None
    loop = ValueError("a")
    loop.__context__ = ValueError("b")
    loop.__context__.__context__ = loop
    assert storage_errno(loop) is None


def test_an_error_that_is_none_of_the_disk_passes_unchanged(tmp_path: Path) -> None:
    error = ValueError("ours")
    with pytest.raises(ValueError, match="ours") as caught, storing(tmp_path):
        raise error
    assert caught.value is error


WRITES_IN_DRAFTS = {
    # Folders that are drafts until they are renamed, fresh temporary ones, or files of a child that is waited for.
    "core/src/nemorl/base/files/owned_folders.py",
    "core/src/nemorl/base/files/saving.py",
    "toolkits/nemorl-tensors/src/nemorl_tensors/engines/checkpoint_files.py",
    "toolkits/nemorl-tensors/src/nemorl_tensors/engines/model_folder.py",
    "toolkits/nemorl-testing/src/nemorl_testing/loggers.py",
    "toolkits/nemorl-testing/src/nemorl_testing/seeing_hearing.py",
    "toolkits/nemorl-testing/src/nemorl_testing/smoke.py",
    "toolkits/nemorl-testing/src/nemorl_testing/templates.py",
    "toolkits/nemorl-testing/src/nemorl_testing/scaffold/writing.py",
    "plugins/nemorl-agents/src/nemorl_agents/programs/folders.py",
}


def test_no_file_is_written_in_place() -> None:
    sources = [p for top in ("core", "toolkits", "plugins", "nemorl-*") for p in ROOT.glob(f"{top}/**/src/**/*.py")]
    assert len(sources) > 300
    writing = re.compile(r"\.write_(text|bytes)\(")
    found = {
        p.relative_to(ROOT).as_posix() for p in sources if writing.search(p.read_text()) and "packages" not in p.parts
    }
    assert found - WRITES_IN_DRAFTS == {"core/src/nemorl/base/files/ownership.py"}


def test_threads_may_replace_one_file_at_once(tmp_path: Path) -> None:
    target, begin = tmp_path / "state.json", threading.Barrier(4)

    def write(number: int) -> None:
        begin.wait()
        for _ in range(50):
            replace_text(target, str(number) * 1000)

    with ThreadPoolExecutor(4) as threads:
        for done in [threads.submit(write, number) for number in range(4)]:
            done.result()
    text = target.read_text()
    assert text == text[0] * 1000
    assert [path.name for path in tmp_path.iterdir()] == ["state.json"]


def test_a_folder_that_the_disk_does_not_list_is_never_taken_for_an_empty_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raises: Raises
) -> None:
    for name in ("step_2", "step_10", "other"):
        (tmp_path / name).touch()
    assert [path.name for path in listed(tmp_path, "step_*")] == ["step_10", "step_2"]
    assert listed(tmp_path / "nowhere") == []

    def fails(path: Path) -> list[str]:
        raise OSError(errno.EIO, "Input/output error", str(path))

    monkeypatch.setattr(os, "listdir", fails)
    with raises(StorageError, tmp_path.name):
        listed(tmp_path)
