"""Rows of presets, through a run of the algorithms that they are for."""

from pathlib import Path
from typing import Any

import nemorl
import pytest
from nemorl_cli.console import Console
from published import EVALUATION, TRAINING

SETTINGS: dict[str, dict[str, Any]] = {
    "sft": {"batch_size": 1},
    "dpo": {"batch_size": 2},
    "grpo": {"num_prompts_per_step": 1, "num_generations_per_prompt": 2, "generation": {"max_new_tokens": 4}},
}


@pytest.mark.parametrize(
    ("algorithm", "preset", "environment"),
    [
        ("sft", "SQuAD", None),
        ("sft", "tulu3_sft_mixture", None),
        ("sft", "arrow_text", None),
        ("sft", "OpenMathInstruct-2", None),
        ("dpo", "HelpSteer3", None),
        ("dpo", "PreferenceDataset", None),
        ("grpo", "GSM8K", "math"),
        ("grpo", "DAPOMath17K", "math"),
        ("grpo", "MMLU", "multiple_choice"),
    ],
)
def test_rows_of_a_preset_are_trained_on(
    tiny_model: Path, tmp_path: Path, algorithm: str, preset: str, environment: str | None
) -> None:
    published = {**EVALUATION, **TRAINING}[preset]
    path = published.write(tmp_path / "rows")
    config: dict[str, Any] = {
        "algorithm": algorithm,
        "model": str(tiny_model),
        "run_dir": str(tmp_path / "run"),
        "policy": {"init": "random", "max_sequence_tokens": 512},
        "data": {"name": preset, "path": str(path), "split": published.split, **published.options},
        "max_steps": 1,
        "checkpoint": {"every": 0, "export": False},
        **SETTINGS[algorithm],
    }
    if environment is not None:
        config["environment"] = environment
    result = nemorl.load_config(config, for_launch=True).build().fit(console=Console(quiet=True))
    assert result.steps == 1
    assert "train/loss" in result.metrics
