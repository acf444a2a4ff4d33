"""Adapters that share a base spread over ranks learn, bit for bit, what each learns alone on these ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from nemorl.config import PolicyConfig
from nemorl_dtensor.model import load_model
from nemorl_rl.models.tiny import write_tiny_model
from nemorl_tensors.engines.model_folder import save_tokenizer
from sharded_adapters import SHAPES, Adapted, largest_difference
from spread_cases import run_spread

pytestmark = pytest.mark.slow


def test_by_turns_is_as_alone(tmp_path: Path) -> None:
    shape, model = tmp_path / "shape", tmp_path / "model"
    write_tiny_model(shape)
    load_model(PolicyConfig(model_name=str(shape), init="random"), seed=7).save_pretrained(model)
    save_tokenizer(model, str(shape))
    cases = {
        "fsdp": Adapted(str(model), 2),
        "tensor parallel": Adapted(str(model), 2, {"tensor_parallel_size": 2}),
    }
    for found in run_spread(largest_difference, cases).values():
        for of_rank in found:
            for name in SHAPES:
                assert of_rank[name] == 0.0
        assert all(max(of_rank[f"{name} moved"] for of_rank in found) > 1e-3 for name in SHAPES)
