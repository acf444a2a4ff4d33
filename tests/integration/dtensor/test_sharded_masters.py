"""float32 masters of a sharded bfloat16 model begin as its weights were before they were rounded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from nemorl.config import PolicyConfig
from nemorl_dtensor.model import load_model
from sharded_runs import Case, masters
from spawned import run_calls
from test_sharded_training import MODELS, TP, write_model
from tiers import in_full
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.slow

LAYOUTS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "dp2": (2, {}, {}),
    "tp2": (2, TP, {}),
    **in_full({"fsdp2 x tp2": (4, TP, {}), "replicas2 x shards2": (4, {}, {"data_parallel_replicas": 2})}),
}
KINDS = {"qwen2": {}, "gpt2": {}, "mixtral": {}, "random": {"init": "random"}}
CASES = [
    (f"{kind} {layout}", kind, size, {**policy, **KINDS[kind], "precision": "bfloat16"}, options)
    for layout, (size, policy, options) in LAYOUTS.items()
    for kind in KINDS
    if not (kind in ("gpt2", "mixtral") and "tensor_parallel_size" in policy)
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {kind: write_model(folder / kind, MODELS["qwen2" if kind == "random" else kind]) for kind in KINDS}


def test_they_are_what_the_files_have_or_what_is_drawn(folders: dict[str, Path]) -> None:
    for size in sorted({case[2] for case in CASES}):
        cases = [Case(name, str(folders[kind]), size, p, o) for name, kind, ranks, p, o in CASES if ranks == size]
        for case, (first, *others) in zip(cases, run_calls([(masters, (case,)) for case in cases], size), strict=True):
            if "init" in case.policy:
                model = load_model(PolicyConfig(model_name=case.model, init="random"), seed=42)
            else:
                model = AutoModelForCausalLM.from_pretrained(case.model, dtype=torch.float32)
            expected = dict(model.named_parameters())
            assert first.keys() == expected.keys(), case.name
            for name, tensor in expected.items():
                assert all(torch.equal(found[name], tensor) for found in (first, *others)), (case.name, name)
