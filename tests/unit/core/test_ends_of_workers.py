"""How workers end: each part though another one fails, and the last words of the one that died, not of those before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from nemorl.resources.ray_actor import WorkerFacts
from nemorl.resources.ray_ranks import LOG_CAUSE_BYTES, LOG_LINES, GroupSettings, Rank
from nemorl.resources.worker import WorkerContext, WorkerHost


class Part:
    """Notes that it was ended, and fails."""

    def __init__(self, name: str, ended: list[str]) -> None:
        self.name, self.ended = name, ended

    def shutdown(self) -> None:
        self.ended.append(self.name)
        raise RuntimeError(self.name)

    close = shutdown


def test_a_part_that_fails_as_it_ends_keeps_no_other_from_ending() -> None:
    ended: list[str] = []
    host = WorkerHost(lambda context: Part("backend", ended), WorkerContext())
    host.attach_engine(lambda backend, context: Part("engine", ended))
    host._senders = {name: Part(name, ended) for name in ("folder", "socket")}
    with pytest.raises(RuntimeError):
        host.shutdown()
    assert ended[:2] == ["engine", "backend"]
    assert sorted(ended[2:]) == ["folder", "socket"]
    assert host._senders == {}


def rank(folder: Path, before: str) -> Rank:
    settings = GroupSettings(name="engine", log_folder=folder)
    log = settings.log(0)
    assert log is not None
    log.write_text(before)
    return Rank(0, settings, None, WorkerFacts("here", "", 7), (), len(before))


def test_the_last_words_are_those_of_the_worker_that_died(tmp_path: Path) -> None:
    replacement = rank(tmp_path, "of the first: RuntimeError\n")
    assert replacement.log_tail == ""
    with (tmp_path / "engine-0.log").open("a") as log:
        log.writelines(f"line {number}\n" for number in range(LOG_CAUSE_BYTES))
    assert replacement.log_tail.splitlines()[1:] == [
        f"    | line {number}" for number in range(LOG_CAUSE_BYTES - LOG_LINES, LOG_CAUSE_BYTES)
    ]
    assert len(replacement.log_end) == LOG_CAUSE_BYTES


def test_a_log_that_cannot_be_read_hides_no_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lost = rank(tmp_path, "")
    (tmp_path / "engine-0.log").write_text("something")

    def refuses(*_: Any) -> None:
        raise OSError(116, "Stale file handle")

    monkeypatch.setattr(Path, "open", refuses)
    assert "Stale file handle" in lost.log_tail
