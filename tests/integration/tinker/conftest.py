"""Servers for the real client, which these tests need: without the package ``tinker`` they are skipped."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from nemorl.resources.ports import free_port
from toy_server import Keeper

if find_spec("tinker") is None:
    collect_ignore_glob = ["test_*.py"]


def pytest_report_header() -> str | None:
    return None if find_spec("tinker") is not None else "tinker is not installed: its tests are left out"


@pytest.fixture(scope="session")
def keeper() -> Iterator[Keeper]:
    found = Keeper()
    yield found
    found.close()


@pytest.fixture
def address(keeper: Keeper, tmp_path: Path) -> str:
    """Of a server of its own."""
    return keeper.begin(tmp_path / "served", free_port(), sweep_s=0.2)
