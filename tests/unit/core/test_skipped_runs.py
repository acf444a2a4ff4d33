"""A run that reached its last step without a single update has not finished: it failed, and says why."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from nemorl.contracts.display import Silence
from nemorl.errors import BackendError
from nemorl.metrics import Mean, Metrics
from nemorl.types import Row
from nemorl_cli.report.run_data import RunData
from nemorl_sft.trainer import SFTTrainer
from recorded_messages import Raises

ROWS = [{"prompt": f"{i}+1=", "response": str(i + 1)} for i in range(8)]


def trainer_of(model: Path, run_dir: Path, skipped: Sequence[float]) -> Any:
    class Overflowing(SFTTrainer):
        """Says of each step which share of its updates was skipped."""

        def train_step(self, rows: Sequence[Row]) -> Metrics:
            return {**super().train_step(rows), "skipped_updates": Mean(skipped[self.step - 1])}

    return Overflowing.from_pretrained(
        str(model),
        run_dir=run_dir,
        batch_size=2,
        max_steps=len(skipped),
        policy={"init": "random", "max_sequence_tokens": 32},
        validation={"every": 0, "at_end": False},
    )


def test_a_run_whose_every_update_was_skipped_has_failed(tiny_model: Path, tmp_path: Path, raises: Raises) -> None:
    run = tmp_path / "run"
    for _ in range(2):  # begun again, it is complete, and no better
        with raises(BackendError, 2):
            trainer_of(tiny_model, run, [1.0, 1.0]).fit(ROWS, resume=True, console=Silence())
        assert RunData.load(run).status == "failed"
    assert not (run / "model").exists()
    assert (run / "checkpoints/step_000002/manifest.json").is_file()


@pytest.mark.parametrize("skipped", [[1.0, 0.5], [0.0, 1.0]])
def test_one_update_is_enough_to_finish(tiny_model: Path, tmp_path: Path, skipped: list[float]) -> None:
    trainer_of(tiny_model, tmp_path / "run", skipped).fit(ROWS, console=Silence())
    assert RunData.load(tmp_path / "run").status == "finished"
