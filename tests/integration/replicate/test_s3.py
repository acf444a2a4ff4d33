"""Replicas on a real S3 server, in a process of its own: that dies, hangs and refuses. Training goes on."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import nemorl
import pytest
from nemorl.base.files.jsonl import read_jsonl
from nemorl.resources.ports import free_port
from nemorl.trainer import TrainResult
from nemorl_cli.console import Console
from nemorl_rl.callbacks import Callback

pytest.importorskip("moto", reason="moto is not installed: pip install 'moto[server]'")
pytest.importorskip("s3fs", reason="s3fs is not installed: pip install 'nemorl-ops[s3]'")
pytestmark = pytest.mark.full

ROWS = [{"prompt": f"{i}+1=", "response": str(i + 1)} for i in range(6)]


class Server:
    """moto's S3, over HTTP."""

    def __init__(self) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for _ in range(600):
            with suppress(OSError), urllib.request.urlopen(f"{self.url}/moto-api/data.json", timeout=5):
                break
            time.sleep(0.1)
        self.make_bucket()

    def make_bucket(self) -> None:
        urllib.request.urlopen(urllib.request.Request(f"{self.url}/bucket", method="PUT"), timeout=30)

    def end(self) -> None:
        with suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        self.process.wait()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "planted-secret")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    found = Server()
    yield found
    found.end()


def fit(server: Server, model: Path, run_dir: Path, *callbacks: object, steps: int = 3, **hook: Any) -> TrainResult:
    options = {"client_kwargs": {"endpoint_url": server.url}}
    replicate = {"name": "replicate", "to": "s3://bucket/runs", "options": options, "timeout_s": 5.0, **hook}
    settings = nemorl.load_config(
        {
            "algorithm": "sft",
            "model": str(model),
            "run_dir": str(run_dir),
            "max_steps": steps,
            "batch_size": 2,
            "checkpoint": {"every": 1, "keep_last": 2, "keep_best": 0, "export": False, "asynchronous": True},
            "policy": {"init": "random", "max_sequence_tokens": 32},
            "plugins": {"hooks": [replicate]},
        }
    )
    return settings.build().fit(ROWS, console=Console(quiet=True), callbacks=callbacks)


def said(run: Path) -> str:
    return "\n".join(str(event.get("message")) for event in read_jsonl(run / "events.jsonl"))


class At(Callback):
    """Does something when a step has ended."""

    def __init__(self, step: int, action: Any) -> None:
        self._step, self._action = step, action

    def on_step_end(self, step: int) -> None:
        if step == self._step:
            self._action()


def test_a_run_goes_on_from_the_store_when_its_folder_is_gone(server: Server, tiny_model: Path, tmp_path: Path) -> None:
    fit(server, tiny_model, tmp_path / "run", steps=2)
    shutil.rmtree(tmp_path / "run")
    found = fit(server, tiny_model, tmp_path / "run", steps=4, resume=True)
    assert [record["step"] for record in found.history] == [3, 4]
    for path in (tmp_path / "run").rglob("*"):
        assert not path.is_file() or b"planted-secret" not in path.read_bytes(), path


def test_a_store_that_dies_in_the_middle_stops_no_training(server: Server, tiny_model: Path, tmp_path: Path) -> None:
    result = fit(server, tiny_model, tmp_path / "run", At(2, server.end), attempts=1)
    assert (result.steps, result.stopped) == (3, None)
    assert "the checkpoint of step 3 has no copy" in said(tmp_path / "run")


def test_a_store_that_answers_no_more_is_waited_for_until_the_end_alone(
    server: Server, tiny_model: Path, tmp_path: Path
) -> None:
    stop = At(1, lambda: os.kill(server.process.pid, signal.SIGSTOP))
    result = fit(server, tiny_model, tmp_path / "run", stop, attempts=1, timeout_s=60.0, wait_at_end_s=0.5)
    assert (result.steps, result.stopped) == (3, None)
    assert "the newest checkpoints are not copied" in said(tmp_path / "run")


def test_a_store_that_is_not_there_stops_no_training(
    server: Server, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = fit(server, tiny_model, tmp_path / "run", to="s3://no-such-bucket/runs", attempts=1)
    assert result.steps == 3
    assert "NoSuchBucket" in said(tmp_path / "run") or "does not exist" in said(tmp_path / "run")


def test_without_credentials_training_goes_on(
    server: Server, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert fit(server, tiny_model, tmp_path / "run", attempts=1).steps == 3
    assert "credentials" in said(tmp_path / "run").lower()
