"""``nemorl doctor --clean`` removes what killed processes left, and nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import Command
from nemorl.base.files import process_guard
from nemorl.base.files.owned_folders import MARK, owned_folder, scratch_folder
from nemorl_insight.doctor.left_folders import left_folders

MAKER = """
import sys
from nemorl.base.files.owned_folders import owned_folder
folder = owned_folder("nemorl-test-", sys.argv[1])
(folder / "below").mkdir()
(folder / "below" / "file").write_bytes(b"x" * 1000)
print(folder, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary files, the only one that is looked at."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr("nemorl_insight.doctor.clean.usual_places", lambda: [folder])
    return folder


@pytest.fixture
def maker(place: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A living process with a folder."""
    command = [sys.executable, "-c", MAKER, str(place)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    yield process, Path(process.stdout.readline().strip())
    process.kill()
    process.communicate()


def kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()


def test_a_folder_is_left_over_once_its_process_was_killed(
    place: Path, maker: tuple[subprocess.Popen[str], Path], nemorl: Command
) -> None:
    process, folder = maker
    assert folder.stat().st_mode & 0o777 == 0o700
    assert nemorl("doctor", "--clean").out == "nothing is left over here\n"
    kill(process)
    (shown,) = nemorl("doctor", "--clean", "--json").json["left_overs"]
    assert (shown["folder"], shown["owner"]["pid"], shown["removed"]) == (str(folder), process.pid, False)
    assert shown["bytes"] >= 1000
    done = nemorl("doctor", "--clean")
    assert done.code == 2, "nobody can be asked"
    assert str(folder) in done.out
    assert folder.exists()
    assert nemorl("doctor", "--clean", "--yes").out.endswith("removed 1 of 1\n")
    assert [*place.iterdir()] == []


def test_processes_of_a_killed_run_end_with_its_folder(
    place: Path, maker: tuple[subprocess.Popen[str], Path], nemorl: Command
) -> None:
    process, folder = maker
    sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
    of_it, other = (
        subprocess.Popen(sleep, env={**os.environ, process_guard.MARK: name}) for name in (str(folder), f"{folder}x")
    )
    try:
        kill(process)
        (left,) = left_folders([place])
        assert left.processes == (of_it.pid,)
        (shown,) = nemorl("doctor", "--clean", "--yes", "--json").json["left_overs"]
        assert shown["removed"]
        assert of_it.wait(30) == -9
        assert other.poll() is None
    finally:
        for child in (of_it, other):
            child.kill()
            child.wait()


# Attacks: what must stay


def test_what_is_not_marked_or_not_ours_stays(place: Path, tmp_path: Path, nemorl: Command) -> None:
    (place / "nemorl-unmarked").mkdir()
    (place / "other").mkdir()
    (place / "other" / MARK).write_text("{}")
    for number, text in enumerate(("", "{}", "[]", "null", '{"namespace": 1}', '{"pid": 1}', "\x00" * 50)):
        (place / f"nemorl-damaged-{number}").mkdir()
        (place / f"nemorl-damaged-{number}" / MARK).write_text(text)
    before = sorted(place.iterdir())
    assert nemorl("doctor", "--clean", "--yes").out == "nothing is left over here\n"
    assert sorted(place.iterdir()) == before


def test_what_another_user_made_stays(
    place: Path, maker: tuple[subprocess.Popen[str], Path], nemorl: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    process, folder = maker
    kill(process)
    monkeypatch.setattr(os, "getuid", lambda: folder.stat().st_uid + 1)  # also root may remove it, and does not
    assert left_folders([place]) == []
    assert nemorl("doctor", "--clean", "--yes").out == "nothing is left over here\n"
    assert folder.exists()


def test_links_are_not_followed(
    place: Path, tmp_path: Path, maker: tuple[subprocess.Popen[str], Path], nemorl: Command
) -> None:
    process, folder = maker
    kill(process)
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_text("x")
    (folder / "link").symlink_to(precious)
    (place / "nemorl-link").symlink_to(folder)
    assert nemorl("doctor", "--clean", "--yes").code == 0
    assert (precious / "file").read_text() == "x"
    assert [path.name for path in place.iterdir()] == ["nemorl-link"], "a link is nobody's folder"


def test_what_has_taken_the_place_of_a_left_over_stays(place: Path, maker: tuple[subprocess.Popen[str], Path]) -> None:
    process, folder = maker
    kill(process)
    (left,) = left_folders([place])
    folder.rename(place / "moved")
    folder.mkdir()
    (folder / "new").write_text("x")
    assert not left.remove()
    assert (folder / "new").read_text() == "x"


@pytest.mark.parametrize("change", [{"host": "another"}, {"namespace": "pid:[1]"}])
def test_what_another_machine_or_container_made_stays(
    place: Path, maker: tuple[subprocess.Popen[str], Path], change: dict[str, str]
) -> None:
    process, folder = maker
    kill(process)
    found = json.loads((folder / MARK).read_text())
    (folder / MARK).write_text(json.dumps({**found, **change}))
    assert left_folders([place]) == []


def test_a_process_with_the_number_of_a_dead_one_is_not_its_owner(place: Path) -> None:
    folder = owned_folder("nemorl-test-", place)
    assert left_folders([place]) == []
    found = json.loads((folder / MARK).read_text())
    (folder / MARK).write_text(json.dumps({**found, "process_start": "1"}))
    assert [left.folder for left in left_folders([place])] == [folder]


def test_a_mark_names_no_command(place: Path) -> None:
    with scratch_folder("nemorl-test-", place) as folder:
        assert json.loads((folder / MARK).read_text())["command"] == ""
    assert [*place.iterdir()] == []


def test_folders_of_runs_are_looked_for_where_they_are_made() -> None:
    from nemorl_insight.doctor.left_folders import usual_places

    assert Path(tempfile.gettempdir()).resolve() in usual_places()
