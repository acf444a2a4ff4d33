"""A run directory has one owner: the second is told who that is, and what a dead owner leaves behind hinders nobody."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import racing
from nemorl.base.files.ownership import FILE, MARKER, Owner, Ownership
from nemorl.errors import NemorlError, RunInUseError, StorageError
from recorded_messages import Raises

HOLDER = """
import sys
from pathlib import Path
from nemorl.base.files.ownership import Ownership
kept = Ownership(Path(sys.argv[1]))
print(flush=True)
sys.stdin.read()
"""


def child(action: Callable[[], int]) -> int:
    """The pid of a forked process that does ``action`` and exits with what that returns."""
    pid = os.fork()
    if pid == 0:  # pragma: no cover - measured in no process that returns
        code = 99
        try:
            code = action()
        finally:
            os._exit(code)
    return pid


def code_of(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.fixture(params=["flock", "no flock"])
def _file_system(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is here, and as a network file system without locks is."""
    if request.param == "no flock":
        monkeypatch.setattr("fcntl.flock", racing.no_flock)


@pytest.mark.parametrize("options", [[], pytest.param(["--no-flock"], marks=pytest.mark.slow)])
def test_of_processes_that_race_for_a_folder_one_gets_it(tmp_path: Path, options: list[str]) -> None:
    command = [sys.executable, racing.__file__, str(tmp_path), *options]
    done = subprocess.run(command, capture_output=True, check=True, timeout=120)
    lost = [racing.LOST] * (racing.RACERS - 1)
    once = {"losers": lost, "winner": -signal.SIGKILL, "winners": "one\n"}
    assert json.loads(done.stdout) == [once] * racing.ROUNDS


@pytest.mark.usefixtures("_file_system")
def test_the_second_is_told_who_holds_the_folder_and_how_to_proceed(tmp_path: Path) -> None:
    first = Ownership(tmp_path)
    with pytest.raises(RunInUseError) as caught:
        Ownership(tmp_path)
    told = caught.value.message
    assert f"{tmp_path} is in use by process {os.getpid()} on {socket.gethostname()}, since 20" in told
    assert Path(sys.argv[0]).name in told
    assert f"kill {os.getpid()}" in str(caught.value.fix)
    first.close()
    first.close()
    Ownership(tmp_path).close()


def test_another_program_is_named_by_its_command(tmp_path: Path, raises: Raises) -> None:
    command = [sys.executable, "-c", HOLDER, str(tmp_path), "--like-a-run"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        with raises(RunInUseError, process.pid, "--like-a-run"):
            Ownership(tmp_path)
        process.kill()
    Ownership(tmp_path).close()


def test_a_child_that_outlives_a_killed_owner_does_not_hold_the_lock(tmp_path: Path) -> None:
    came, told = os.pipe()

    def owner() -> int:
        kept = Ownership(tmp_path)
        child(lambda: (os.write(told, str(os.getpid()).encode()) and signal.pause()) or 0)
        signal.pause()
        kept.close()
        return 0

    pid = child(owner)
    grandchild = int(os.read(came, 20))
    try:
        os.kill(pid, signal.SIGKILL)
        code_of(pid)
        os.kill(grandchild, 0)  # it is alive
        Ownership(tmp_path).close()
    finally:
        os.kill(grandchild, signal.SIGKILL)


def test_without_flock_what_a_killed_owner_leaves_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fcntl.flock", racing.no_flock)
    kept: list[Ownership] = []
    pid = child(lambda: kept.append(Ownership(tmp_path)) or 0)  # type: ignore[func-returns-value]  # never closed
    assert code_of(pid) == 0
    assert (tmp_path / MARKER).read_text().startswith(f"{pid}\n")
    after = Ownership(tmp_path)
    assert Owner.read((tmp_path / FILE).read_text()) == replace(Owner.me(), since=pytest.approx(time.time(), abs=60))
    after.close()
    assert [path.name for path in tmp_path.iterdir()] == [FILE]


@pytest.mark.parametrize(
    ("marker", "record", "facts"),
    [
        ("7\nelsewhere\n", asdict(replace(Owner.me(), host="elsewhere", pid=7)), [7, "elsewhere"]),
        ("{", asdict(replace(Owner.me(), boot_id="before", pid=7)), [7]),
        ("{", {"host": 3}, []),
        ("{", asdict(Owner.me()) | {"pid": "7"}, []),
        ("{", asdict(Owner.me()) | {"since": "yesterday"}, []),
        ("{", asdict(Owner.me()) | {"since": 1e300}, []),
        ("", [], []),
    ],
    ids=["other host", "ended", "other record", "pid of a text", "time of a text", "far off", "no record"],
)
def test_without_flock_what_cannot_be_judged_is_not_overridden(
    tmp_path: Path, marker: str, record: object, facts: list[object], monkeypatch: pytest.MonkeyPatch, raises: Raises
) -> None:
    monkeypatch.setattr("fcntl.flock", racing.no_flock)
    (tmp_path / MARKER).write_text(marker)
    (tmp_path / FILE).write_text(json.dumps(record))
    with raises(RunInUseError, *facts, tmp_path / MARKER):
        Ownership(tmp_path)
    assert (tmp_path / MARKER).read_text() == marker


@pytest.mark.parametrize("text", ["{", "[]", '{"host": 3}', "\x00\xff", "[" * 100_000])
def test_with_flock_the_record_is_only_a_name(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE).write_text(text)
    Ownership(tmp_path).close()


def test_a_lock_that_is_a_folder_is_one_clear_error(tmp_path: Path, raises: Raises) -> None:
    (tmp_path / FILE).mkdir()
    with raises(StorageError, "run.lock") as caught:
        Ownership(tmp_path)
    assert isinstance(caught.value, NemorlError)


def test_a_disk_that_refuses_the_record_of_the_end_is_no_error_and_keeps_no_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = Ownership(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", Mock(side_effect=OSError(errno.EIO, "Input/output error")))
        kept.close()
    kept.close()
    assert (tmp_path / FILE).read_text()
    Ownership(tmp_path).close()


def test_a_disk_that_refuses_the_first_record_keeps_no_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raises: Raises
) -> None:
    with monkeypatch.context() as patch, raises(StorageError, tmp_path / FILE):
        patch.setattr(Path, "write_bytes", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
        Ownership(tmp_path)
    Ownership(tmp_path).close()


def test_an_owner_removes_what_killed_ones_had_begun_to_write(tmp_path: Path) -> None:
    begun = [".config.yaml.41.draft", "records/train/.step_000001.parquet.41.draft"]
    kept = ["config.yaml", "records/train/step_000001.parquet"]
    for name in [*begun, *kept]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / ".nemorl-probe").mkdir()
    Ownership(tmp_path).close()
    files = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if not path.is_dir()}
    assert files == {FILE, *kept}
    assert not (tmp_path / ".nemorl-probe").exists()
