"""Adapters beside their base: what backends are planned to hold of them, and what they do."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from nemorl.config import PolicyConfig
from nemorl.contracts.memory import OffloadingBackend
from nemorl.resources.worker import WorkerContext
from nemorl_rl.models.model_geometry import Geometry
from nemorl_rl.planning.memory.models import HeldModel
from nemorl_rl.planning.memory.parts import total
from nemorl_sft.loss import NLLLoss
from nemorl_tensors import TokenBatch
from nemorl_testing.models import tiny_model

MEGATRON = [
    pytest.mark.megatron,
    pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed"),
]
NF4 = pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")


@pytest.mark.parametrize(
    ("backend", "precision", "base"),
    [
        ("dtensor", "bfloat16", "full"),
        pytest.param("dtensor", "bfloat16", "nf4", marks=NF4),
        pytest.param("megatron", "bfloat16", "full", marks=MEGATRON),
        pytest.param("megatron", "float32", "full", marks=MEGATRON),
    ],
)
def test_adapters_and_their_base_take_what_was_planned(backend: str, precision: Any, base: str) -> None:
    folder = tiny_model(hidden_size=128, intermediate_size=256)
    fields: dict[str, Any] = {"lora": {"rank": 8, "base": base}, "backend": backend, "schedule": {"decay_steps": 10}}
    policy = PolicyConfig(model_name=str(folder), precision=precision, **fields)
    built = policy.backend.build(policy, WorkerContext(), reference=True)
    assert isinstance(built, OffloadingBackend)
    built.train_step(TokenBatch.from_sequences([[5, 6, 7, 8]], [[False, True, True, True]]), NLLLoss())
    held = built.held_bytes()
    geometry = Geometry.from_config(json.loads((Path(folder) / "config.json").read_text()))
    model = HeldModel("policy", policy, geometry, 1, True, has_reference=True, microbatch_tokens=64, accumulates=False)
    for part in ("weights", "optimizer", "reference"):
        planned = total(found for found in model.moments.lasting if found.held == part)
        assert planned == pytest.approx(held[part], rel=0.005, abs=500), part  # type: ignore[index]
    built.shutdown()
