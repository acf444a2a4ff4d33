"""Adapters that share a base spread over ranks learn, bit for bit, what each learns alone on these ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from nemorl.config import PolicyConfig
from nemorl_dtensor.model import load_model
from nemorl_rl.models.tiny import write_tiny_model
from nemorl_tensors.engines.model_folder import save_tokenizer
from sharded_adapters import SHAPES, Adapted, learned
from spread_cases import run_spread

pytestmark = pytest.mark.slow


def test_by_turns_is_as_alone(tmp_path: Path) -> None:
    shape, model = tmp_path / "shape", tmp_path / "model"
    write_tiny_model(shape)
    load_model(PolicyConfig(model_name=str(shape), init="random"), seed=7).save_pretrained(model)
    save_tokenizer(model, str(shape))
    ways: dict[str, dict[str, Any]] = {"fsdp": {}, "tensor parallel": {"tensor_parallel_size": 2}}
    together = tuple(SHAPES)
    cases = {
        f"{way}: {', '.join(names)}": Adapted(str(model), 2, names, policy)
        for way, policy in ways.items()
        for names in (*((name,) for name in SHAPES), together)
    }
    found = run_spread(learned, cases)
    for way in ways:
        for name in SHAPES:
            moved = 0.0
            alone, beside = found[f"{way}: {name}"], found[f"{way}: {', '.join(together)}"]
            for one, other in zip(alone, beside, strict=True):
                assert len(one[name].last) == len(other[name].last)
                assert all(torch.equal(*pair) for pair in zip(one[name].last, other[name].last, strict=True))
                changes = zip(one[name].first, one[name].last, strict=False)
                moved = max(moved, *(float((b - a).abs().max()) for a, b in changes if a.numel()))
            assert moved > 1e-3
