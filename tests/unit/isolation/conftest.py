"""A hostile plugin."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hostile_plugins import Plugin, hostile
from nemorl_trust.isolation.process import IsolatedProcess


@pytest.fixture
def plugin(tmp_path: Path) -> Plugin:
    def make(code: str, **record: Any) -> IsolatedProcess:
        return hostile(tmp_path / "acme-evil", code, **record)

    return make
