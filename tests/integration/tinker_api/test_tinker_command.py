"""``nemorl serve --tinker`` as a process, which trains a tiny model for real."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from nemorl_testing.models import tiny_model
from raw_client import BASE, RawClient, step_body

pytestmark = pytest.mark.slow
pytest.importorskip("tinker", reason="the package tinker is not installed")


@contextmanager
def command(model: str, *words: str) -> Iterator[subprocess.Popen[str]]:
    named = [model, "--name", BASE]
    line = [sys.executable, "-c", "from nemorl_cli import main; main()", "serve", *named, "--tinker", *words]
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def told(process: subprocess.Popen[str]) -> Any:
    assert process.stdout is not None
    return json.loads(process.stdout.readline())


@pytest.mark.full
def test_it_says_where_ends_on_ctrl_c_and_goes_on_with_its_key(tmp_path: Path) -> None:
    folder, model = str(tmp_path / "served"), str(tiny_model())
    with command(model, "--json", "--directory", folder) as process:
        first = told(process)
        assert first["adapters"]["largest_rank"] == 32
        (key,) = first["api_keys"].values()
        client = RawClient(first["base_url"], key=key)
        made = client.model(client.session())
        client.result("/optim_step", step_body(made, 1))
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    port = first["base_url"].rpartition(":")[2]
    with command(model, "--json", "--directory", folder, "--port", port) as process:
        assert told(process) == first
        assert b"metrics" in client.result("/optim_step", step_body(made, 2))


def test_one_directory_has_one_server(tmp_path: Path) -> None:
    folder, model = str(tmp_path / "served"), str(tiny_model())
    with command(model, "--json", "--directory", folder) as first:
        told(first)
        with command(model, "--json", "--directory", folder) as second:
            assert second.wait(120) == 2
            assert second.stderr is not None
            assert folder in second.stderr.read()


def test_a_model_that_is_not_there_is_named(tmp_path: Path) -> None:
    with command(str(tmp_path / "no model"), "--directory", str(tmp_path / "served")) as process:
        assert process.wait(120) == 2
        assert process.stderr is not None
        assert "no model" in process.stderr.read()
