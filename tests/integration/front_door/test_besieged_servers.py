"""Strangers cannot take a server's descriptors, its log or its time: others are answered, and files can be opened."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from attacks import ATTACKS, HALF, under
from besieged import FILES

pytestmark = pytest.mark.slow

PATIENCE_S = 30.0
ASKED = 3
LOG_BYTES = 100_000
CHEAPEST = ("half-open", "slow body", "storm")
"""Attacks that each server is put under; the gateway, under all."""


class Besieged:
    """A server in a process of its own."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.log = folder / "log"
        script = Path(__file__).with_name("besieged.py")
        with self.log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, script, name, folder],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self.facts: dict[str, Any] = self._heard()
        self.quiet = self.ask("files")

    @property
    def place(self) -> tuple[str, int]:
        url = httpx.URL(self.facts["address"])
        assert url.port is not None
        return url.host, url.port

    def ask(self, what: str) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(what + "\n")
        self._process.stdin.flush()
        return self._heard()

    def _heard(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, self.log.read_text()[-5000:]
        return json.loads(line)

    def status(self) -> int:
        """What a client that is entitled to an answer gets, on a connection of its own."""
        url = self.facts["address"] + self.facts["path"]
        return httpx.get(url, headers=self.facts.get("headers"), timeout=PATIENCE_S, trust_env=False).status_code

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture(scope="module", params=["gateway", "prometheus", "view", "relay"])
def besieged(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Besieged]:
    found = Besieged(request.param, tmp_path_factory.mktemp(request.param))
    yield found
    found.end()


def until(true: Callable[[], bool]) -> None:
    """Wait for something that must come."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


@pytest.mark.parametrize("attack", ATTACKS)
def test_others_are_answered_and_files_can_be_opened(besieged: Besieged, attack: str) -> None:
    if attack not in CHEAPEST and besieged.name != "gateway":
        pytest.skip("the door is the same")
    assert besieged.status() < 400
    with under(attack, besieged.place) as crowd:
        for _ in range(ASKED):
            assert besieged.status() < 400
            files = besieged.ask("files")
            assert isinstance(files, int), files
            assert files <= besieged.quiet + FILES // 4 + 8  # of other connections: the real one, an event loop's
    assert crowd.closed
    until(lambda: besieged.ask("files") <= besieged.quiet + 8)
    assert besieged.log.stat().st_size < LOG_BYTES
    assert "Traceback" not in besieged.log.read_text()


def test_a_process_without_descriptors_says_so_in_a_line_and_goes_on(besieged: Besieged) -> None:
    besieged.ask("exhaust")
    with ExitStack() as stack:
        for _ in range(50):
            stack.enter_context(socket.create_connection(besieged.place, timeout=PATIENCE_S)).send(HALF)
        until(lambda: "cannot accept connections" in besieged.log.read_text())
        assert isinstance(besieged.ask("files"), str)  # there are none indeed
        besieged.ask("release")
        assert besieged.status() < 400
    assert besieged.log.read_text().count("cannot accept connections") == 1
    assert besieged.log.stat().st_size < LOG_BYTES


@pytest.mark.parametrize("attack", ATTACKS)
def test_openai_own_client_is_answered(besieged: Besieged, attack: str) -> None:
    if "key" not in besieged.facts:
        pytest.skip("no server of a model")
    with (
        under(attack, besieged.place),
        openai.OpenAI(base_url=besieged.facts["address"] + "/v1", api_key=besieged.facts["key"]) as client,
    ):
        for _ in range(ASKED):
            answer = client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "2+2?"}])
            assert answer.choices[0].message.content == "4"
