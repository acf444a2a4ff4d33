"""Environments of other versions: what is in them, and what stays as it is."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest
from nemorl.errors import PluginError
from nemorl_insight.doctor.upgrades.overlays import cache_folder, clean, kept, overlay, variables
from nemorl_insight.doctor.upgrades.processes import run_limited
from nemorl_insight.doctor.upgrades.resolving import Change, download, parse, resolve, versions
from real_runs import fingerprint
from recorded_messages import Raises

SHOW = """
import acmelib, acmetools, importlib.metadata as m
print(acmelib.__file__, m.version("acmelib"), acmetools.__file__)
"""


def resolved(text: str, pip_args: Sequence[str]) -> list[Change]:
    return resolve(parse(text), pip_args)


@pytest.mark.full
def test_a_change_is_what_pip_would_do_with_its_size(acme: Path, index: Path, pip_args: Sequence[str]) -> None:
    [change] = resolved("acmelib==1.1", pip_args)
    size = (index / "acmelib-1.1-py3-none-any.whl").stat().st_size
    assert change == Change("acmelib", "1.0", "1.1", size)
    assert resolved("acmelib==1.0", pip_args) == []


@pytest.mark.full
def test_what_the_new_metadata_force_to_change_comes_after(acme: Path, pip_args: Sequence[str]) -> None:
    changes = resolved("acmelib==5.0", pip_args)
    assert [change.pin for change in changes] == ["acmelib==5.0", "acmetools==2.1"]
    total, known = download(changes)
    assert known
    assert total == sum(change.size or 0 for change in changes) > 0


@pytest.mark.full
def test_a_size_that_is_not_said_is_not_taken_for_none() -> None:
    assert download([Change("a", None, "1", 5), Change("b", None, "1", None)]) == (5, False)


def test_a_version_that_is_not_there_is_named(acme: Path, pip_args: Sequence[str], raises: Raises) -> None:
    with raises(PluginError, "acmelib==9"):
        resolved("acmelib==9", pip_args)


@pytest.mark.full
def test_the_newest_of_each_minor_version_is_found(acme: Path, index: Path, pip_args: Sequence[str]) -> None:
    (index / "acmelib-1.1-py3-none-any.whl").rename(index / "acmelib-1.1.3-py3-none-any.whl")
    assert versions(parse("acmelib>=1.1,<4"), pip_args) == ["1.1.3", "2.0", "3.0"]


@pytest.mark.full
def test_only_what_changed_is_another(acme: Path, pip_args: Sequence[str]) -> None:
    before = fingerprint(acme)
    with overlay(resolved("acmelib==1.1", pip_args), pip_args) as made:
        done = run_limited([str(made.python), "-P", "-c", SHOW], 60, variables(made))
        lib, version, tools = done.out.split()
        assert Path(lib).is_relative_to(made.folder)
        assert version == "1.1"
        assert Path(tools).is_relative_to(acme)
        here = run_limited([sys.executable, "-P", "-c", SHOW], 60, variables(None))
        assert here.out.split()[:2] == [str(acme / "acmelib" / "__init__.py"), "1.0"]
    assert not made.folder.exists()
    assert {name: hash_ for name, hash_ in fingerprint(acme).items() if "__pycache__" not in name} == before


@pytest.mark.full
def test_a_kept_one_is_used_again_and_removed_when_asked(acme: Path, pip_args: Sequence[str]) -> None:
    changes = resolved("acmelib==1.1", pip_args)
    with overlay(changes, pip_args, keep=True) as first:
        pass
    with overlay(changes, ["--no-such-option"]) as second:  # pip is not asked
        assert second.folder == first.folder
    assert [one.folder for one in kept()] == [first.folder]
    assert clean() > 0
    assert kept() == []
    assert not first.folder.exists()


@pytest.mark.full
def test_an_interruption_leaves_nothing(acme: Path, pip_args: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> None:
    changes = resolved("acmelib==1.1", pip_args)
    with pytest.raises(KeyboardInterrupt), overlay(changes, pip_args):
        raise KeyboardInterrupt
    assert list(cache_folder().iterdir()) == []

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("nemorl_insight.doctor.upgrades.overlays.run_limited", interrupted)  # while pip unpacks
    with pytest.raises(KeyboardInterrupt), overlay(changes, pip_args, keep=True):
        pass
    assert list(cache_folder().iterdir()) == []


@pytest.mark.full
def test_what_a_killed_try_left_is_cleaned(acme: Path) -> None:
    left = cache_folder() / ".writing_acmelib-1.1-00000000"
    left.mkdir(parents=True)
    (left / "half").write_text("12345")
    assert clean() == 5
    assert not left.exists()


def is_alive(pid: int) -> bool:
    """It runs: a zombie has ended, and waits for whoever inherited it."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.full
def test_a_command_ends_at_its_limit_with_all_that_it_started() -> None:
    script = (
        "import subprocess, sys, time; p = subprocess.Popen(['sleep', '60']); print(p.pid, flush=True); time.sleep(60)"
    )
    done = run_limited([sys.executable, "-c", script], 3)
    assert done.code is None
    assert "3 s" in done.error
    child = int(done.out)
    deadline = time.monotonic() + 10
    while is_alive(child):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.full
def test_an_error_is_the_last_line_or_the_one_that_says_so() -> None:
    fail = "import sys; print('error: the cause', file=sys.stderr); print('  fix: that', file=sys.stderr); sys.exit(2)"
    assert run_limited([sys.executable, "-c", fail], 30).error == "error: the cause"
    assert run_limited([sys.executable, "-c", "import no_such_module"], 30).error.endswith("'no_such_module'")
