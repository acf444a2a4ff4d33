"""The audit log: what honest and crashed writers leave is whole, and every change by hand shows."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from nemorl.base.files.atomic import exported
from nemorl.errors import StorageError, UsageError
from nemorl_trust.audit.chain import Entry, SealingKey
from nemorl_trust.audit.log import AuditLog
from nemorl_trust.audit.recording import audit_log, record
from nemorl_trust.audit.verifying import entries_of, verify
from recorded_messages import Raises

WRITER = """
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from nemorl_trust.audit.log import AuditLog
log = AuditLog(Path(sys.argv[1]))
for number in range(int(sys.argv[2])):
    log.append("step", {"number": number})
    print(number, flush=True)
"""


@pytest.fixture
def log(tmp_path: Path) -> AuditLog:
    """Five entries."""
    found = AuditLog(tmp_path / "alice.jsonl")
    for number in range(5):
        found.append("step", {"number": number})
    return found


def lines(log: AuditLog) -> list[bytes]:
    return log.path.read_bytes().splitlines()


def write_lines(log: AuditLog, found: list[bytes]) -> None:
    log.path.write_bytes(b"".join(line + b"\n" for line in found))


def said(log: AuditLog, key: SealingKey | None = None) -> str:
    return "; ".join(problem.what for problem in verify(log.path, key=key).problems)


# What honest writers leave


def test_an_entry_is_checked_by_hand(log: AuditLog) -> None:
    first, second = (json.loads(line) for line in lines(log)[:2])
    content = {name: value for name, value in first.items() if name != "hash"}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    assert first["previous"] == "0" * 64
    assert first["hash"] == hashlib.sha256(text.encode()).hexdigest() == second["previous"]
    assert (first["uid"], first["pid"], first["facts"]) == (os.getuid(), os.getpid(), {"number": 0})


def test_a_log_is_whole(log: AuditLog) -> None:
    verdict = verify(log.path)
    assert (verdict.ok, verdict.entries, verdict.head) == (True, 5, f"4:{json.loads(lines(log)[4])['hash']}")
    assert log.path.stat().st_mode & 0o777 == log.state_path.stat().st_mode & 0o777 == 0o600


def test_facts_of_any_kind_are_kept_as_json(log: AuditLog) -> None:
    log.append("odd", {"path": Path("/a"), "nan": float("nan"), "text": "é\udc80\n\x00", "nested": {"a": (1, 2)}})
    assert verify(log.path).ok
    facts = [*entries_of(log.path)][-1].facts
    assert (facts["path"], facts["nan"], facts["nested"]) == ("/a", None, {"a": [1, 2]})


def test_threads_and_processes_that_write_at_once_lose_nothing(log: AuditLog) -> None:
    others = [subprocess.Popen([sys.executable, "-c", WRITER, str(log.path), "20"]) for _ in range(2)]
    with ThreadPoolExecutor(4) as threads:
        [*threads.map(lambda number: log.append("thread", {"number": number}), range(40))]
    assert [other.wait(60) for other in others] == [0, 0]
    assert (verify(log.path).entries, said(log)) == (5 + 40 + 2 * 20, "")


def test_a_writer_that_is_killed_leaves_a_whole_log(log: AuditLog) -> None:
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(log.path), "100000"], stdout=subprocess.PIPE)
    assert writer.stdout is not None
    for _ in range(10):
        writer.stdout.readline()
    os.kill(writer.pid, signal.SIGKILL)
    writer.communicate()
    log.append("next", {})
    assert said(log) == ""
    assert verify(log.path).entries >= 5 + 10 + 1


# What a crash leaves: a part of a line, or a state that is one entry behind


@pytest.mark.parametrize("cut", [1, 40, 200])
def test_a_part_of_a_line_stays_and_is_accounted_for(log: AuditLog, cut: int) -> None:
    whole = log.path.read_bytes()
    log.path.write_bytes(whole + lines(log)[4][:cut])
    assert "no later entry accounts for it" in said(log), "until the next writer comes"
    log.append("next", {})
    assert said(log) == ""
    assert log.path.read_bytes().startswith(whole + lines(log)[4][:cut] + b"\n"), "nothing is ever changed"
    assert [*entries_of(log.path)][-1].debris == {
        "bytes": cut + 1,
        "sha256": hashlib.sha256(lines(log)[4][:cut] + b"\n").hexdigest(),
    }


def test_two_crashes_in_a_row_are_accounted_for(log: AuditLog) -> None:
    log.path.write_bytes(log.path.read_bytes() + b'{"half"\n{"event"')
    log.append("next", {})
    assert said(log) == ""
    log.append("after", {})
    assert (said(log), verify(log.path).entries) == ("", 7)


def test_a_line_without_its_newline_is_whole(log: AuditLog) -> None:
    log.path.write_bytes(log.path.read_bytes().removesuffix(b"\n"))
    assert said(log) == ""
    log.append("next", {})
    assert (said(log), verify(log.path).entries) == ("", 6)


@pytest.mark.parametrize("is_sealed", [False, True])
def test_a_crash_between_entry_and_state_is_no_damage(log: AuditLog, is_sealed: bool) -> None:
    key = log.seal() if is_sealed else None
    before = log.state_path.read_text()
    log.append("next", {})
    log.state_path.write_text(before)
    assert said(log, key) == ""
    log.append("after", {})
    assert said(log, key) == ""


def test_a_full_disk_is_an_error_that_the_next_entry_survives(
    log: AuditLog, small_files_only: Any, raises: Raises
) -> None:
    with small_files_only(log.path.stat().st_size + 100), raises(StorageError, "alice.jsonl"):
        log.append("too long", {"text": "x" * 1000})
    log.append("next", {})
    assert said(log) == ""


# Attacks


def forged(line: bytes, **changes: object) -> bytes:
    """An entry with other content and the hash that fits it."""
    content = {**json.loads(line), **changes}
    return Entry(**content).chained().line()


ATTACKS: dict[str, tuple[Callable[[list[bytes]], list[bytes]], str]] = {
    "edited": (lambda found: [*found[:2], found[2].replace(b'"number":2', b'"number":7'), *found[3:]], "is no entry"),
    "edited, its hash fixed up": (
        lambda found: [*found[:2], forged(found[2], event="nothing"), *found[3:]],
        "entry 3 does not continue",
    ),
    "the last one edited, its hash fixed up": (
        lambda found: [*found[:4], forged(found[4], event="nothing")],
        "its end is not what its writer knew",
    ),
    "one dropped": (lambda found: [*found[:2], *found[3:]], "entry 3 stands where entry 2 belongs"),
    "two swapped": (lambda found: [found[0], found[2], found[1], *found[3:]], "entry 2 stands where entry 1 belongs"),
    "one twice": (lambda found: [*found[:3], found[2], *found[3:]], "entry 2 stands where entry 3 belongs"),
    "cut at the end": (lambda found: found[:3], "2 entries are missing at the end"),
    "emptied": (lambda found: [], "5 entries are missing at the end"),
    "cut at the beginning": (lambda found: found[2:], "entry 2 stands where entry 0 belongs"),
    "one appended by hand": (
        lambda found: (
            [*found, forged(forged(found[4], n=5), previous=json.loads(found[4])["hash"], event="x")] * 1 + [b""]
        ),
        "is no entry",
    ),
    "a key twice in an object": (
        lambda found: [found[0].replace(b'"event":', b'"event":"nothing","event":'), *found[1:]],
        "is no entry",
    ),
    "spaces": (lambda found: [found[0].replace(b'","', b'", "'), *found[1:]], "is no entry"),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_change_by_hand_is_found(log: AuditLog, attack: str) -> None:
    change, problem = ATTACKS[attack]
    write_lines(log, change(lines(log)))
    assert problem in said(log)


@pytest.mark.parametrize("attack", ["cut at the end", "emptied", "edited", "the last one edited, its hash fixed up"])
def test_writing_on_after_an_attack_does_not_heal_it(log: AuditLog, attack: str) -> None:
    write_lines(log, ATTACKS[attack][0](lines(log)))
    log.append("next", {})
    log.append("after", {})
    assert not verify(log.path).ok


def test_without_its_state_a_log_may_have_been_cut(log: AuditLog) -> None:
    log.state_path.unlink()
    assert "the state file beside it is missing" in said(log)


def rewritten(log: AuditLog, count: int) -> None:
    """What somebody does who may write log and state: a whole new history of ``count`` entries."""
    log.path.unlink()
    log.state_path.unlink()
    for number in range(count):
        log.append("step", {"number": -number})


def test_only_a_head_or_a_key_kept_elsewhere_finds_a_history_that_was_written_anew(log: AuditLog) -> None:
    number, _, digest = verify(log.path).head.partition(":")
    rewritten(log, 5)
    assert verify(log.path).ok, "the chain alone cannot know"
    problems = verify(log.path, head=(int(number), digest)).problems
    assert [problem.what for problem in problems] == ["entry 4 is not the one that was there when its hash was noted"]
    rewritten(log, 3)
    assert [p.what for p in verify(log.path, head=(4, digest)).problems] == ["entry 4, which was there once, is gone"]


# Sealed


def test_a_seal_is_checked_by_hand(log: AuditLog) -> None:
    key = log.seal()
    log.append("next", {})
    sealed, after = (json.loads(line) for line in lines(log)[5:])
    assert sealed["seal"] == hmac.new(key.secret, sealed["hash"].encode(), "sha256").hexdigest()
    second = hashlib.sha256(b"nemorl audit key" + key.secret).digest()
    assert after["seal"] == hmac.new(second, after["hash"].encode(), "sha256").hexdigest()
    verdict = verify(log.path, key=SealingKey.parse(key.text()))
    assert (verdict.ok, verdict.entries, verdict.sealed, verdict.checked) == (True, 7, 2, 2)
    assert key.secret.hex() not in log.state_path.read_text() + log.path.read_text()


@pytest.mark.parametrize("count", [0, 3, 5, 7, 8])
def test_who_takes_over_the_account_cannot_write_a_sealed_log_anew(log: AuditLog, count: int) -> None:
    key = log.seal()
    log.append("next", {})
    rewritten(log, count)
    assert not verify(log.path, key=key).ok


def test_who_has_the_newest_key_cannot_change_an_earlier_entry(log: AuditLog) -> None:
    key = log.seal()
    log.append("bad deed", {})
    stolen = json.loads(log.state_path.read_text())
    found = lines(log)
    for attempt in (found[:6], [*found[:6], forged(found[6], event="good deed", seal=None)]):
        write_lines(log, attempt)
        digest = json.loads(attempt[-1])["hash"]
        log.state_path.write_text(json.dumps({**stolen, "count": len(attempt), "hash": digest}))
        assert not verify(log.path, key=key).ok


def test_another_key_verifies_nothing(log: AuditLog, tmp_path: Path) -> None:
    log.seal()
    assert not verify(log.path, key=SealingKey(5, b"x" * 32)).ok
    assert SealingKey.parse("nemorl-audit-key x y") is SealingKey.parse("") is None


def test_a_log_is_sealed_once(log: AuditLog, raises: Raises) -> None:
    log.seal()
    with raises(UsageError, "alice.jsonl"):
        log.seal()


def test_absurd_numbers_are_refused_at_once(log: AuditLog) -> None:
    key = log.seal()
    write_lines(log, [*lines(log), forged(lines(log)[5], n=10**15)])
    log.state_path.write_text(json.dumps({"count": 10**15, "hash": "0" * 64, "key": "00" * 32}))
    assert not verify(log.path, key=key).ok


def test_a_seal_of_other_letters_is_a_wrong_one(log: AuditLog) -> None:
    key = log.seal()
    (*_, last) = entries_of(log.path)
    write_lines(log, [*lines(log)[:-1], replace(last, seal="é" * 64).line()])
    assert "is not of this key" in said(log, key)


# Where it is


def test_a_link_in_the_place_of_a_log_is_refused(tmp_path: Path, raises: Raises) -> None:
    target = tmp_path / "secret"
    target.write_text("x")
    (tmp_path / "alice.jsonl").symlink_to(target)
    with raises(StorageError, "alice.jsonl"):
        AuditLog(tmp_path / "alice.jsonl").append("x", {})
    os.link(target, tmp_path / "bob.jsonl")
    with raises(StorageError, "bob.jsonl", varies=r"owner \S+,"):
        AuditLog(tmp_path / "bob.jsonl").append("x", {})
    assert target.read_text() == "x"


def test_who_cannot_write_warns_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEMORL_AUDIT", str(tmp_path / "file" / "folder"))
    (tmp_path / "file").write_text("")
    warnings: list[str] = []
    record("x", {}, warnings.append)
    assert "no entry in the audit log" in warnings[0]
    monkeypatch.setenv("NEMORL_AUDIT", "off")
    assert audit_log() is None


def test_the_user_is_the_systems_not_the_environments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pwd

    for name in ("USER", "LOGNAME", "USERNAME"):
        monkeypatch.setenv(name, "somebody")
    monkeypatch.setenv("NEMORL_AUDIT", str(tmp_path))
    record("x", {})
    me = pwd.getpwuid(os.getuid()).pw_name
    assert [entry.user for entry in entries_of(tmp_path / f"{me}.jsonl")] == [me]


def test_exported_folders_are_counted(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x").write_bytes(b"12345")
    (tmp_path / "y").write_bytes(b"1")
    assert exported(tmp_path) == {"to": str(tmp_path.resolve()), "files": 2, "bytes": 6}


def test_a_clock_that_was_set_back_is_remarked_upon(log: AuditLog, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time()
    monkeypatch.setattr("nemorl_trust.audit.log.time.time", lambda: now - 3600)
    log.append("run_started", {"run": "hidden"})
    found = verify(log.path)
    assert found.ok, "clocks are set back by honest people too"
    (remark,) = found.remarks
    assert remark.line == 6
    assert "entry 5 is dated 3600 s before an earlier one" in remark.what


@pytest.mark.parametrize(
    "change",
    [
        *({"time": "today"}, {"time": None}, {"time": 10**400}, {"time": 1e300}, {"time": -1e300}),
        *({"event": 7}, {"user": ["a"]}, {"facts": "x"}, {"n": True}, {"seal": 1}),
    ],
    ids=str,
)
def test_a_line_with_a_right_hash_and_fields_of_another_kind_is_no_entry(log: AuditLog, change: dict[str, Any]) -> None:
    (*_, last) = entries_of(log.path)
    forged = replace(last, **change).chained()
    write_lines(log, [*lines(log)[:-1], forged.line()])
    assert not verify(log.path).ok
    assert len([*entries_of(log.path)]) == 4, "readers do not meet it"


@pytest.mark.parametrize("place", ["a file", "too long", "home of nobody", "not to be written"])
def test_a_log_that_cannot_be_written_is_said_by_default(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    places = {
        "a file": tmp_path / "file",
        "too long": tmp_path / ("x" * 5000),
        "home of nobody": "~nobody_here/audit",
        "not to be written": "/proc/audit",
    }
    monkeypatch.setenv("NEMORL_AUDIT", str(places[place]))
    monkeypatch.chdir(tmp_path)
    record("run_started", {"run": "here"})
    said = capsys.readouterr().err
    assert said.count("no entry in the audit log") == (place != "home of nobody")  # which is a folder of that name
