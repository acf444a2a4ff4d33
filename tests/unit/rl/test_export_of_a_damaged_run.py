"""Which checkpoint `nemorl export` takes where one cannot be read: none in its place."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from nemorl.config.run import CheckpointConfig
from nemorl.errors import CheckpointError
from nemorl.storage.checkpoints import CheckpointManager
from nemorl_rl.models.exporting import export_model
from recorded_messages import Raises


@pytest.mark.parametrize("best", [False, True])
def test_an_older_checkpoint_is_not_exported_for_the_latest(tmp_path: Path, best: bool, raises: Raises) -> None:
    run = tmp_path / "run"
    manager = CheckpointManager(run / "checkpoints", CheckpointConfig(keep_last=5), metric="")
    for step in (1, 2):
        manager.begin(step, {"policy": lambda path: (path / "weights").write_bytes(b"w") and None}, {}, {})
        manager.publish(wait=True)
    (run / "config.yaml").write_text(json.dumps({"algorithm": "sft", "model": "a", "run_dir": "run", "data": None}))
    (run / "checkpoints/step_000002/manifest.json").write_text("")
    with raises(CheckpointError, "step_000002", 1):
        export_model(run, tmp_path / "model", best=best)
    assert not (tmp_path / "model").exists()
