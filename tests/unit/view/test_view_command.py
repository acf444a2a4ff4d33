"""``nemorl view`` as a process: it prints its address, serves, and ends with Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

import pytest
from command_line import Command
from nemorl.errors import UsageError
from nemorl_insight.view.serving import Viewer
from nemorl_trust.listening import Place
from recorded_messages import Raises


def make_run(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.yaml").write_text("algorithm: grpo\nmodel: tiny\n")
    return folder


@pytest.mark.slow
def test_it_serves_until_ctrl_c(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    command = [sys.executable, "-m", "nemorl", "view", str(run), "--json"]
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    # A shell that starts it in the background would have it ignore Ctrl-C.
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        url = json.loads(process.stdout.readline())["url"]
        address, token = url.split("?token=")
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.urlopen(f"{address}api/info")
        cookie = f"nemorl-view-{urllib.parse.urlsplit(url).port}={token}"
        with urllib.request.urlopen(urllib.request.Request(f"{address}api/info", headers={"cookie": cookie})) as answer:
            assert json.load(answer)["title"] == "run"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, "")
    assert [path.name for path in run.iterdir()] == ["config.yaml"]
    assert len(list((tmp_path / "cache/nemorl/view").glob("*.sqlite"))) == 1


@pytest.mark.slow
def test_what_cannot_be_served_is_said(tmp_path: Path, nemorl: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    done = nemorl("view", tmp_path / "nowhere", "--no-browser")
    assert (done.code, "is not a run directory" in done.err) == (2, True)
    run = make_run(tmp_path / "run")
    with Viewer([run], tmp_path / "cache") as viewer:
        port = str(urllib.parse.urlsplit(viewer.url).port)
        done = nemorl("view", run, "--no-browser", "--port", port)
        assert "cannot listen on 127.0.0.1" in done.err
    with Viewer([run], tmp_path / "cache", Place("0.0.0.0", plaintext=True)) as viewer:
        assert "?token=" in viewer.url
        viewer.shutdown()  # twice is harmless


@pytest.mark.parametrize(
    "place",
    [
        Place("0.0.0.0"),
        Place("203.0.113.7", plaintext=True),
        Place(tls_certificate=Path("a.pem")),
        Place(tls_certificate=Path("a.pem"), tls_key=Path("b.pem")),
    ],
)
def test_places_where_it_cannot_listen_are_refused(place: Place, tmp_path: Path, raises: Raises) -> None:
    run = make_run(tmp_path / "run")
    with raises(UsageError):
        Viewer([run], tmp_path / "cache", place)
