"""Records of a run whose model sees: what is read back is what was trained on, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import nemorl
import pytest
from nemorl.types import Sample
from nemorl_cli.console import Console
from nemorl_cli.report.records import writing
from nemorl_cli.report.records.reading import FOLDER
from nemorl_cli.report.records.table import Rollout, table_of
from nemorl_insight.diff.recorded import RecordedStep
from nemorl_insight.diff.run_files import RunFiles
from nemorl_rl.models.tiny_sight import write_tiny_sight


def told(sample: Sample) -> Any:
    """All that training reads of a sample."""
    media = [(item.kind, item.digest, item.data) for item in sample.media]
    shown = [item.digest for item in sample.prompt.media]
    fields = sample.token_ids, sample.response_mask, sample.generation_logprobs, sample.turn_rewards
    return (sample.prompt.index, sample.prompt.token_ids, shown, *fields, sample.score, media)


@pytest.mark.slow
def test_a_run_with_images_reads_back_what_it_trained_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: dict[int, list[Sample]] = {}

    def kept(rollout: Rollout, decode: Any) -> Any:
        written[rollout.step] = [sample for group in rollout.groups for sample in group.samples]
        return table_of(rollout, decode)

    monkeypatch.setattr(writing, "table_of", kept)
    run = tmp_path / "run"
    config = {
        "algorithm": "grpo",
        "model": str(write_tiny_sight(tmp_path / "model")),
        "run_dir": str(run),
        "data": {"name": "drawings"},
        "environment": "math",
        "num_prompts_per_step": 3,
        "num_generations_per_prompt": 2,
        "max_steps": 2,
        "policy": {"init": "random", "optimizer": {"lr": 1e-3}, "media": {"train": ["connector", "tower"]}},
        "generation": {"max_new_tokens": 2},
        "validation": {"every": 0, "at_end": False},
    }
    nemorl.load_config(config).build().fit(None, console=Console(quiet=True))
    trainer = nemorl.load_config(run / "config.yaml").build()
    for step in (1, 2):
        recorded = RecordedStep.read(RunFiles.of(run), step, trainer)
        assert [told(sample) for sample in recorded.samples] == [told(sample) for sample in written[step]]
        assert all(len(sample.media) == 1 for sample in recorded.samples)
    # Each image once, however many responses show it, and none of it in a line of JSON.
    shown = {item.digest for samples in written.values() for sample in samples for item in sample.media}
    assert {path.stem for path in (run / FOLDER / "media").iterdir()} == shown
    for path in run.rglob("*.json*"):
        text = path.read_text()
        assert "iVBOR" not in text  # how PNG begins in base64
        assert "\\x89PNG" not in text
    assert json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["step"] == 2
