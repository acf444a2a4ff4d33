"""``nemorl serve --tinker`` as a process, with toy models in the place of those that train for real."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
from raw_client import RawClient, step_body
from toy_server import TESTS

OPENED = """
    import sys
    from contextlib import contextmanager
    from types import ModuleType

    from tinker_toy import ToyModels, toy_loss

    losses = ModuleType("nemorl_agents.tinker.losses")
    losses.loss_named = toy_loss
    sys.modules["nemorl_agents.tinker.losses"] = losses


    @contextmanager
    def opened(settings):
        assert settings.model == "a model", settings
        yield ToyModels()
"""


@contextmanager
def command(site: Path, *words: str) -> Iterator[subprocess.Popen[str]]:
    paths = [str(site), str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    line = [sys.executable, "-c", "from nemorl_cli import main; main()", "serve", "a model", "--tinker", *words]
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture
def site(tmp_path: Path) -> Path:
    pytest.importorskip("tinker", reason="the package tinker is not installed")
    info = tmp_path / "site" / "toy_opener-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-opener\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[nemorl.slots]\ntinker_models = toy_opener:opened\n")
    (tmp_path / "site" / "toy_opener.py").write_text(dedent(OPENED))
    return tmp_path / "site"


def told(process: subprocess.Popen[str]) -> Any:
    assert process.stdout is not None
    return json.loads(process.stdout.readline())


def test_it_says_where_ends_on_ctrl_c_and_goes_on_with_its_key(site: Path, tmp_path: Path) -> None:
    folder = str(tmp_path / "served")
    with command(site, "--json", "--directory", folder) as process:
        first = told(process)
        (key,) = first["api_keys"].values()
        client = RawClient(first["base_url"], key=key)
        model = client.model(client.session())
        client.result("/optim_step", step_body(model, 1))
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    port = first["base_url"].rpartition(":")[2]
    with command(site, "--json", "--directory", folder, "--port", port) as process:
        assert told(process) == first
        assert b"metrics" in client.result("/optim_step", step_body(model, 2))


def test_one_directory_has_one_server(site: Path, tmp_path: Path) -> None:
    folder = str(tmp_path / "served")
    with command(site, "--json", "--directory", folder) as first:
        told(first)
        with command(site, "--json", "--directory", folder) as second:
            assert second.wait(60) == 2
            assert second.stderr is not None
            assert folder in second.stderr.read()


def test_without_models_to_train_it_says_so(tmp_path: Path) -> None:
    """Also where the slot is filled for real: a model of no name is no model."""
    pytest.importorskip("tinker", reason="the package tinker is not installed")
    with command(tmp_path, "--directory", str(tmp_path / "served")) as process:
        assert process.wait(60) == 2
        assert process.stderr is not None
        assert "fix:" in process.stderr.read()
