"""A run is killed, its disk fills and its clock jumps, as seeds say: two here, hundreds by ``random_blows.py``."""

from __future__ import annotations

import shutil
import socket
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from blows import AT_ONCE, Blow, Strikes, schedule
from random_blows import RandomBlows
from subjects import SUBJECTS
from warm import Warm
from wires import Wire, tell


def test_a_schedule_follows_from_its_seed_alone() -> None:
    for name, subject in SUBJECTS.items():
        assert schedule(7, subject.blows, name) == schedule(7, subject.blows, name)
        every = [blow for seed in range(300) for life in schedule(seed, subject.blows, name) for blow in life]
        assert {blow.what for blow in every} == set(subject.blows)
        assert {blow.step for blow in every if blow.what.partition(" ")[2] in AT_ONCE} <= {0, 1, 2, 3}
        assert {blow.step for blow in every if blow.what.partition(" ")[2] not in AT_ONCE} <= {1, 2, 3}


def _echoing() -> socket.socket:
    """A server on this machine that says again what it is told."""
    listening = socket.create_server(("127.0.0.1", 0))

    def answer(client: socket.socket) -> None:
        while data := client.recv(64):
            client.sendall(data)

    def serve() -> None:
        while True:
            client, _ = listening.accept()
            threading.Thread(target=answer, args=(client,), daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    return listening


def _is_broken(client: socket.socket) -> bool:
    """Nothing more comes: the other side has reset the connection, or ended it."""
    try:
        return client.recv(64) == b""
    except ConnectionError:
        return True


def test_a_wire_that_is_silent_loses_nothing_and_one_that_is_reset_breaks() -> None:
    with Wire(_echoing().getsockname()[1]) as wire:
        with socket.create_connection(("127.0.0.1", wire.port), timeout=30) as client:
            client.sendall(b"before")
            assert client.recv(64) == b"before"
            tell(wire.control, "silence 1000")
            while not wire.is_silent:
                pass
            client.sendall(b"meanwhile")
            client.settimeout(0.1)
            with pytest.raises(TimeoutError):
                client.recv(64)
            wire.mend()
            client.settimeout(30)
            assert client.recv(64) == b"meanwhile"
            tell(wire.control, "reset 1000")
            assert _is_broken(client)
        try:
            with socket.create_connection(("127.0.0.1", wire.port), timeout=30) as client:
                assert _is_broken(client)
        except ConnectionResetError:  # before it was even made
            pass
        wire.mend()
        with socket.create_connection(("127.0.0.1", wire.port), timeout=30) as client:
            client.sendall(b"again")
            assert client.recv(64) == b"again"


def test_a_blow_for_a_step_that_a_life_does_not_have_falls_in_its_last_before_the_run_is_over(tmp_path: Path) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as told:
        told.bind(("127.0.0.1", 0))
        control = f"127.0.0.1:{told.getsockname()[1]}"
        strikes = Strikes([Blow("cut wire", 3, 0.0, 0.5)], tmp_path / "struck", tmp_path, control)
        trainer = SimpleNamespace(config=SimpleNamespace(max_steps=4))
        strikes.on_step_begin(trainer, 3)
        strikes.on_fit_end()
        assert not (tmp_path / "struck").exists()
        strikes.on_step_begin(trainer, 4)
        strikes.on_fit_end()
        assert told.recv(64) == b"silence 0.5"
    assert (tmp_path / "struck").read_text() == "cut wire 0.5\n"


runs_lives = pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("cc") is None, reason="needs Linux and a C compiler"
)


@pytest.mark.slow
@runs_lives
@pytest.mark.parametrize("seed", [0])
def test_a_run_under_random_blows_ends_as_in_peace(place: Path, forks: Warm, seed: int) -> None:
    with RandomBlows(place / "grpo", "grpo", forks) as runs:
        found = runs.play(seed)
    assert found["problems"] == []
    assert found["ends"][-1] == 0


@pytest.mark.full
@runs_lives
@pytest.mark.parametrize("name", sorted(SUBJECTS))
def test_every_subject_stands_a_seed(place: Path, forks: Warm, name: str) -> None:
    if SUBJECTS[name].has_nodes:
        pytest.skip("needs a network namespace of its own: random_blows.py")
    with RandomBlows(place / name.replace(" ", "_"), name, forks) as runs:
        assert runs.play(0)["problems"] == []
