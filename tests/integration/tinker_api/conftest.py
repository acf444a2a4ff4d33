"""Servers for the real client, which these tests need: without the package ``tinker`` they are skipped."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from nemorl.resources.ports import free_port
from toy_server import Keeper


@pytest.fixture(scope="session")
def keeper() -> Iterator[Keeper]:
    pytest.importorskip("tinker", reason="the package tinker, whose messages the server speaks, is not installed")
    found = Keeper()
    yield found
    found.close()


@pytest.fixture
def address(keeper: Keeper, tmp_path: Path) -> str:
    """Of a server of its own."""
    return keeper.begin(tmp_path / "served", free_port(), sweep_s=0.2)
