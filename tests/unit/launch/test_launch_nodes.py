"""The program on each node: how it ends, and what it tells the others. Ray has its part in the integration tests."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from nemorl_ops.launch import node
from nemorl_ops.launch.attempts import Attempt, Outcome
from nemorl_ops.launch.ray_access import make_access, own_access
from nemorl_ops.launch.ray_part import ClusterView
from nemorl_trust import authority

SAVES = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
open("ready", "w").close()
time.sleep(60)
"""
STUBBORN = SAVES.replace("lambda *_: sys.exit(0)", "signal.SIG_IGN")


def attempt(tmp_path: Path) -> Attempt:
    folder = tmp_path / "attempt-0"
    folder.mkdir(exist_ok=True)
    return Attempt(folder)


def started(tmp_path: Path, program: str, *options: str) -> subprocess.Popen[str]:
    """The program of rank 0 with one node, whose run is a few lines of Python."""
    command = [
        sys.executable,
        "-m",
        "nemorl_ops.launch.node",
        f"--attempt={tmp_path / 'attempt-0'}",
        "--name=n0",
        *options,
    ]
    words = [*command, "--", sys.executable, "-c", program]
    return subprocess.Popen(words, cwd=tmp_path, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def await_file(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("code", "outcome"),
    [(0, Outcome("finished")), (3, Outcome("failed", "the run ended with code 3, see run.log"))],
)
def test_a_run_that_ends_by_itself(tmp_path: Path, code: int, outcome: Outcome) -> None:
    run = started(tmp_path, f"print('some words'); raise SystemExit({code})")
    assert run.wait(60) == int(code != 0)
    assert attempt(tmp_path).outcome == outcome
    assert (tmp_path / "attempt-0" / "run.log").read_text() == "some words\n"
    assert attempt(tmp_path).node_name(0) == "n0"


@pytest.mark.parametrize(
    ("reason", "outcome"),
    [
        ("the time limit is near", Outcome("continue", "the time limit is near")),
        ("cancelled", Outcome("cancelled", "cancelled")),
    ],
)
def test_a_run_that_is_asked_to_stop_saves(tmp_path: Path, reason: str, outcome: Outcome) -> None:
    run = started(tmp_path, SAVES)
    await_file(tmp_path / "ready")
    attempt(tmp_path).request_stop(reason)
    assert run.wait(60) == 0
    assert attempt(tmp_path).outcome == outcome


def test_a_signal_asks_for_the_same(tmp_path: Path) -> None:
    run = started(tmp_path, SAVES)
    await_file(tmp_path / "ready")
    run.terminate()
    assert run.wait(60) == 0
    assert attempt(tmp_path).outcome == Outcome("continue", "received SIGTERM")


def test_a_run_that_does_not_save_in_time_is_ended_and_continues_from_before(tmp_path: Path) -> None:
    run = started(tmp_path, STUBBORN, "--grace-s=0.5")
    await_file(tmp_path / "ready")
    attempt(tmp_path).request_stop("the time limit is near")
    assert run.wait(60) == 0
    assert attempt(tmp_path).outcome == Outcome("continue", "the time limit is near; it did not save in time")


def test_a_node_that_finds_no_head_tells_the_first_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(node.signal, "signal", lambda *_: None)
    words = [f"--attempt={attempt(tmp_path).folder}", "--name=n7", "--rank=1", "--nodes=2", "--join-s=0", "--", "true"]
    assert node.main(words) == 1
    assert attempt(tmp_path).lost() == {1: "rank 0 has started no head of Ray within 0 s"}
    assert attempt(tmp_path).node_name(1) == "n7"
    assert "see ray-0.log" in capsys.readouterr().err


class Part:
    """This node's part of Ray, which ends when its head is gone."""

    def __init__(self) -> None:
        self.exit_code: int | None = 1
        self.is_closed = False

    def close(self) -> None:
        self.is_closed = True


def test_a_node_whose_part_of_ray_has_ended_says_so_and_waits_no_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, part = attempt(tmp_path), Part()
    monkeypatch.setattr(node.signal, "signal", lambda *_: None)
    monkeypatch.setattr(node.Node, "start_ray", lambda self, head: part)
    found.note("head", {"address": "192.0.2.1:10001"})
    words = [f"--attempt={found.folder}", "--name=n7", "--rank=1", "--nodes=2"]
    assert node.main([*words, "--join-s=0", "--plaintext", "--", "true"]) == 0
    assert part.is_closed
    assert found.lost() == {1: "Ray's processes on it ended with code 1, see ray-1.log"}


def test_each_node_of_an_attempt_has_a_certificate_that_this_user_alone_can_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_USE_TLS", raising=False)
    make_access(tmp_path, plaintext=False)
    first = own_access(tmp_path, "node-0", "10.0.0.7", plaintext=False)
    assert first == own_access(tmp_path, "node-0", "10.0.0.7", plaintext=False), "made once"
    assert own_access(tmp_path, "node-1", "10.0.0.8", plaintext=False) != first
    (own,) = authority.read(Path(first["RAY_TLS_SERVER_CERT"]))
    assert own.names[:2] == ("node-0", "10.0.0.7")
    assert Path(first["RAY_AUTH_TOKEN_PATH"]).stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "ray-certificates").stat().st_mode & 0o777 == 0o700


def test_nodes_with_certificates_of_their_site_and_plain_ones_get_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_USE_TLS", raising=False)
    make_access(tmp_path, plaintext=True)
    assert own_access(tmp_path, "node-0", "10.0.0.7", plaintext=True).keys() == {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH"}
    monkeypatch.setenv("RAY_USE_TLS", "1")
    make_access(tmp_path, plaintext=False)
    assert "RAY_USE_TLS" not in own_access(tmp_path, "node-0", "10.0.0.7", plaintext=False)
    assert not (tmp_path / "ray-certificates").exists()


def test_ray_is_not_asked_before_its_head_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)  # which cannot be imported then
    with socket.socket() as head:
        head.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{head.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", address)
        for given in (address, "auto"):
            with pytest.raises(ConnectionError):
                ClusterView(given, {})
        head.listen()
        for given in (address, "auto"):
            with pytest.raises(ImportError):
                ClusterView(given, {})
