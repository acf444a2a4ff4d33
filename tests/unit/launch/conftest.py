"""What tests of the launchers share: a config in an empty folder."""

from __future__ import annotations

from pathlib import Path

import pytest

CONFIG = """\
algorithm: grpo
model: org/model
data: arithmetic
environment: math
max_steps: 3
"""


@pytest.fixture
def run_yaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run's config in the current folder, which holds nothing else."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "run.yaml"
    path.write_text(CONFIG)
    return path
