"""A command that is over ends, whatever threads and processes plugins have left behind, and says whose they are."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

BEGIN = """
import os, subprocess, sys, threading, time
from nemorl_cli import app, leaving
leaving.LINGER_S = 0.3
sys.argv = ["nemorl", *sys.argv[1:]]
def acme_uploads():
    time.sleep(600)
command = app._run
def run(arguments, *, debug):
    exec(during)
    return command(arguments, debug=debug)
app._run = run
"""


def run(during: str, *arguments: str, before: str = "") -> subprocess.CompletedProcess[str]:
    """A command during which, or before which, that code runs."""
    return subprocess.run(
        [sys.executable, "-c", f"{BEGIN}during = {during!r}\n{before}\napp.main()", *arguments],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


@pytest.mark.parametrize(("arguments", "code"), [(("--version",), 0), (("no-such-command",), 2)])
def test_a_thread_that_does_not_end_is_named_and_waited_for_no_longer(arguments: tuple[str, ...], code: int) -> None:
    done = run("threading.Thread(target=acme_uploads, name='acme').start()", *arguments)
    assert done.returncode == code
    assert "the thread 'acme' does not end (it runs acme_uploads" in done.stderr
    assert done.stdout or code


def test_a_daemon_and_a_thread_that_ends_are_nobodys_business() -> None:
    started = "threading.Thread(target=acme_uploads, daemon=True).start(); threading.Thread(target=print).start()"
    done = run(started, "--version")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_forked_child_is_ended_and_holds_no_pipe_open() -> None:
    done = run("child = os.fork()\nif child == 0: acme_uploads()\nprint(child, flush=True)", "--version")
    child = int(done.stdout.split()[0])
    assert done.returncode == 0
    assert f"process {child} was left behind" in done.stderr
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)


def test_what_was_detached_on_purpose_stays() -> None:
    started = "p = subprocess.Popen(['sleep', '30'], start_new_session=True, stdout=-3, stderr=-3)"
    done = run(f"{started}; print(p.pid, flush=True)", "--version")
    child = int(done.stdout.split()[0])
    assert (done.returncode, done.stderr) == (0, "")
    os.kill(child, 9)


def test_a_child_from_before_the_command_stays() -> None:
    """``monitor & exec nemorl train …`` in a job script."""
    started = "p = subprocess.Popen(['sleep', '30'], stdout=-3, stderr=-3); print(p.pid, flush=True)"
    done = run("", "--version", before=started)
    child = int(done.stdout.split()[0])
    assert (done.returncode, done.stderr) == (0, "")
    os.kill(child, 9)
