"""What the journal keeps, and whom it lets in."""

from __future__ import annotations

import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest
from nemorl.errors import StorageError, UsageError
from nemorl_agents.tinker.errors import ApiError
from nemorl_agents.tinker.journal import Journal
from nemorl_agents.tinker.records import Answer, Records, Request, Session
from recorded_messages import Raises

SESSION = Session("s", "ada", 1.5, None, {"type": "active"}, {"tags": ["a"], "display_name": None})
REQUEST = Request("m:1", "m", 1, "s", "ada", "optim_step", "digest", b"body", created_s=2.0)


def test_rows_come_back_as_they_were(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    Records(journal).sessions.put(SESSION)
    journal.close()
    records = Records(Journal(tmp_path))
    assert records.sessions.get("s") == SESSION
    records.sessions.change("s", ended_s=3.0)
    assert records.sessions.where("owner = ? AND ended_s > 2", "ada") == [replace(SESSION, ended_s=3.0)]
    records.sessions.remove("s")
    assert records.sessions.get("s") is None


def test_a_block_that_fails_leaves_nothing(tmp_path: Path) -> None:
    records = Records(Journal(tmp_path))

    def fails() -> None:
        with records.journal.writing():
            records.sessions.put(SESSION)
            with records.journal.writing():
                records.requests.put(REQUEST)
            raise RuntimeError("in between")

    with pytest.raises(RuntimeError):
        fails()
    assert (records.sessions.count("1"), records.requests.count("1")) == (0, 0)
    records.sessions.put(SESSION)  # and it goes on
    assert records.sessions.count("1") == 1


def test_one_folder_has_one_server(tmp_path: Path, raises: Raises) -> None:
    first = Journal(tmp_path)
    with raises(UsageError, tmp_path, "--directory"):
        Journal(tmp_path)
    first.close()
    Journal(tmp_path).close()


def test_tables_of_another_version_are_refused(tmp_path: Path, raises: Raises) -> None:
    Journal(tmp_path).close()
    with sqlite3.connect(tmp_path / "journal.sqlite") as db:
        db.execute("PRAGMA user_version = 99")
    with raises(UsageError, "99"):
        Journal(tmp_path)


def test_a_full_disk_is_named(tmp_path: Path, raises: Raises) -> None:
    records = Records(Journal(tmp_path))
    with records.journal.writing() as db:
        (pages,) = db.execute("PRAGMA page_count").fetchone()
    records.journal._write.execute(f"PRAGMA max_page_count = {pages}")
    with raises(StorageError, "full"):
        records.requests.put(replace(REQUEST, body=bytes(100_000)))
    records.journal._write.execute("PRAGMA max_page_count = 1000000")
    records.requests.put(replace(REQUEST, body=bytes(100_000)))


def test_the_same_number_takes_the_same_body_alone(tmp_path: Path) -> None:
    records = Records(Journal(tmp_path))
    other = replace(REQUEST, digest="other")
    assert records.submit([REQUEST, REQUEST]) == [True, False]
    (again, refused, new) = records.submit([REQUEST, other, replace(other, id="m:2", seq=2)])
    assert (again, new) == (False, True)
    assert isinstance(refused, ApiError)
    assert (refused.status, "request 1 of m" in refused.message) == (400, True)


def test_answers_are_kept_until_they_were_fetched_long_ago(tmp_path: Path) -> None:
    records = Records(Journal(tmp_path))
    answer = Answer("done", b"{}")
    for seq, keeps_body in ((1, False), (2, True), (3, False)):
        request = replace(REQUEST, id=f"m:{seq}", seq=seq)
        records.submit([request])
        records.finish(request, answer, keeps_body=keeps_body)
    records.note_fetched({"m:1": 100.0, "m:2": 100.0})
    records.drop_answers(100.0)
    assert [records.answer(f"m:{seq}") for seq in (1, 2, 3)] == [("ada", answer)] * 3
    records.drop_answers(101.0)
    states = [found[1].state for seq in (1, 2, 3) if (found := records.answer(f"m:{seq}"))]
    assert states == ["gone", "done", "done"]  # the second will be run again, the third was not fetched
    assert records.next_seq("m") == 4


def test_a_session_that_ended_long_ago_keeps_no_answers(tmp_path: Path) -> None:
    records = Records(Journal(tmp_path))
    records.sessions.put(replace(SESSION, ended_s=100.0))
    records.submit([REQUEST])
    records.finish(REQUEST, Answer("done", b"{}"), keeps_body=True)
    records.drop_answers(100.0)
    assert records.answer("m:1") == ("ada", Answer("done", b"{}"))
    records.drop_answers(100.5)
    row = records.requests.get("m:1")
    assert row is not None
    assert (row.state, row.answer, row.body) == ("gone", None, None)
