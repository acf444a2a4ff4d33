"""Fixtures of unit tests: plugins that are installed for the length of a test, and the command line."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from command_line import Command, command
from installed_plugins import Install, write_distribution
from nemorl.plugins import registry


@pytest.fixture(scope="session", autouse=True)
def _a_registry_without_what_tests_install() -> None:
    registry()  # that of this process is made once


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty site-packages folder at the front of sys.path, forgotten afterwards."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    before = set(sys.modules)
    yield folder
    for name in set(sys.modules) - before:
        if name.startswith("acme"):
            del sys.modules[name]


@pytest.fixture
def install(site: Path) -> Install:
    def add(distribution: str, entries: dict[str, str], *, folder: Path = site, **options: Any) -> None:
        write_distribution(folder, distribution, entries, **options)

    return add


@pytest.fixture
def nemorl(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    """Runs ``nemorl …`` in this process."""
    return command(monkeypatch, capfd)
