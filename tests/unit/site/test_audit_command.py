"""``nemorl audit``, and what a run writes into the log."""

from __future__ import annotations

import hashlib
import json
import time
from pathlib import Path

import nemorl as library
import pytest
from command_line import Command
from nemorl.contracts.display import Silence
from nemorl_trust.audit.log import AuditLog, user_name
from nemorl_trust.audit.recording import record

ROWS = [{"prompt": f"{i}+1=", "response": str(i + 1)} for i in range(4)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where audit logs are for the length of a test."""
    monkeypatch.setenv("NEMORL_AUDIT", str(tmp_path / "audit"))
    return tmp_path / "audit"


@pytest.mark.slow
def test_a_run_is_recorded(tiny_model: Path, tmp_path: Path, folder: Path, nemorl: Command) -> None:
    run = tmp_path / "run"
    config = library.load_config(
        {
            "algorithm": "sft",
            "model": str(tiny_model),
            "policy": {"init": "random", "max_sequence_tokens": 32},
            "batch_size": 2,
            "max_steps": 1,
            "run_dir": str(run),
            "validation": {"at_end": False},
        }
    )
    config.build().fit(ROWS, console=Silence())
    assert nemorl("audit", "verify").code == 0
    started, exported, finished = nemorl("audit", "show", "--run", run, "--json").json
    assert [entry["event"] for entry in (started, exported, finished)] == [
        "run_started",
        "weights_exported",
        "run_finished",
    ]
    facts = started["facts"]
    assert facts["config_sha256"] == hashlib.sha256((run / "config.yaml").read_bytes()).hexdigest()
    locked = json.loads((run / "plugins.lock.json").read_text())["plugins"]
    assert {(plugin["distribution"], plugin["files_sha256"]) for plugin in facts["plugins"]} == {
        (plugin["distribution"], plugin["files_sha256"]) for plugin in locked
    }
    assert {"nemorl-sft", "nemorl-dtensor", "nemorl-core"} <= {p["distribution"] for p in facts["plugins"]}
    sizes = [path.stat().st_size for path in (run / "model").rglob("*")]
    assert (exported["facts"]["bytes"], exported["facts"]["files"]) == (sum(sizes), len(sizes))
    assert (finished["facts"]["step"], finished["facts"]["attempt"]) == (1, facts["attempt"])


@pytest.mark.slow
def test_entries_are_chosen_by_user_run_event_and_time(folder: Path, nemorl: Command) -> None:
    record("run_started", {"run": "/runs/a"})
    record("run_finished", {"run": "/runs/a"})
    record("run_started", {"run": "/runs/b"})
    shown = {
        "all": nemorl("audit", "show", "--json"),
        "run": nemorl("audit", "show", "--run", "/runs/a", "--json"),
        "event": nemorl("audit", "show", "--event", "run_started", "--json"),
        "user": nemorl("audit", "show", "--user", user_name(), "--json"),
        "another": nemorl("audit", "show", "--user", "nobody at all", "--json"),
        "recent": nemorl("audit", "show", "--since", "1h", "--json"),
        "old": nemorl("audit", "show", "--until", "1h", "--json"),
        "this year": nemorl("audit", "show", "--since", f"{time.gmtime().tm_year - 1}-01-01", "--json"),
    }
    counts = {name: len(done.json) for name, done in shown.items()}
    assert counts == {
        "all": 3, "run": 2, "event": 2, "user": 3, "another": 0, "recent": 3, "old": 0, "this year": 3,
    }  # fmt: skip
    assert "run_finished" in nemorl("audit", "show").out


@pytest.mark.slow
def test_logs_of_several_users_are_verified_together(folder: Path, nemorl: Command) -> None:
    for name in ("alice", "bob"):
        AuditLog(folder / f"{name}.jsonl").append("x", {"by": name})
    assert [verdict["ok"] for verdict in nemorl("audit", "verify", "--json").json] == [True, True]
    assert [entry["facts"]["by"] for entry in nemorl("audit", "show", "--json").json] == ["alice", "bob"]
    (folder / "bob.jsonl").write_text("")
    done = nemorl("audit", "verify")
    assert done.code == 1
    assert "1 entries are missing at the end" in done.out


@pytest.mark.slow
def test_a_sealed_log_is_verified_with_its_key_alone(folder: Path, tmp_path: Path, nemorl: Command) -> None:
    record("before", {})
    key = tmp_path / "audit.key"
    assert nemorl("audit", "seal", key).code == 0
    assert key.stat().st_mode & 0o777 == 0o600
    record("after", {})
    (verdict,) = nemorl("audit", "verify", "--key", key, "--json").json
    assert (verdict["ok"], verdict["entries"], verdict["seals_checked"]) == (True, 3, 2)
    head = verdict["head"]
    assert nemorl("audit", "verify", "--head", head).code == 0
    assert nemorl("audit", "verify", "--head", head.replace("2:", "3:")).code == 1
    assert nemorl("audit", "seal", key).code == 2, "a key is never overwritten"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("verify", "--head", "4"), "no head of a log"),
        (("verify", "--key", "missing"), "holds no key"),
        (("verify", "--key", "noise"), "holds no key"),
        (("show", "--since", "tomorrow"), "no time"),
        (("show", "nowhere.jsonl"), "no audit log"),
    ],
)
def test_mistakes_are_said(folder: Path, nemorl: Command, arguments: tuple[str, ...], said: str) -> None:
    record("x", {})
    (folder / "noise").write_bytes(bytes(range(256)))
    done = nemorl("audit", *(str(folder / "noise") if word == "noise" else word for word in arguments))
    assert done.code == 2
    assert said in done.err


def test_a_log_that_is_off_says_so(monkeypatch: pytest.MonkeyPatch, nemorl: Command) -> None:
    monkeypatch.setenv("NEMORL_AUDIT", "off")
    assert "off" in nemorl("audit", "verify").err


def test_a_clock_that_is_set_hides_no_entry(tmp_path: Path, nemorl: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    log, now = AuditLog(tmp_path / "alice.jsonl"), time.time()
    for name, shift_s in (("before", -7200), ("first", 0), ("dated back", -9e8), ("dated ahead", 9e8), ("last", 0)):
        monkeypatch.setattr("nemorl_trust.audit.log.time.time", lambda shift_s=shift_s: now + shift_s)
        log.append(name, {})
    monkeypatch.undo()

    def events(*options: str) -> list[str]:
        return sorted(entry["event"] for entry in nemorl("audit", "show", log.path, "--json", *options).json)

    assert events("--since", "1h") == ["dated ahead", "dated back", "first", "last"]
    assert events("--until", "1h") == ["before", "dated back", "first"], "what stands before one of then"
