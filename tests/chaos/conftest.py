"""One process that all lives are forked from."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from lives import warm
from warm import Warm


@pytest.fixture(scope="session")
def place() -> Iterator[Path]:
    memory = Path("/dev/shm")  # a sync costs nothing there
    with TemporaryDirectory(prefix="nemorl-chaos-", dir=memory if os.access(memory, os.W_OK) else None) as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def forks(place: Path) -> Iterator[Warm]:
    with warm(place) as found:
        yield found
