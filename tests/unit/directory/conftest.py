"""A publisher of indexes, and a user whose settings and state are empty."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hand_made_indexes import Publisher
from nemorl.base.packages.plugin_policy import machine_policy


@pytest.fixture
def publisher(tmp_path: Path) -> Publisher:
    return Publisher(tmp_path)


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Settings and state of nobody else."""
    for variable in ("XDG_STATE_HOME", "XDG_CONFIG_HOME", "XDG_CONFIG_DIRS"):
        monkeypatch.setenv(variable, str(tmp_path / variable.lower()))
    for variable in ("NEMORL_PLUGIN_INDEX", "NEMORL_PLUGIN_INDEX_KEY"):
        monkeypatch.delenv(variable, raising=False)
    machine_policy.cache_clear()
    yield
    machine_policy.cache_clear()
