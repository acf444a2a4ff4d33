"""Adapters of a mixture: vLLM gets them merged; by themselves it refuses them on the CPU, with the way out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from nemorl.config import PolicyConfig
from nemorl.errors import BackendError
from nemorl.resources.worker import WorkerContext
from nemorl.types import GenerationRequest, SamplingParams
from nemorl.weights import WeightHandle, in_process_handle
from nemorl_dtensor import DTensorConfig
from nemorl_testing.models import load_reference, tiny_model
from peft import PeftModel
from recorded_messages import Raises
from vllm_engines import gaps

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

LORA = {"lora": {"rank": 4, "alpha": 12.0}}
SIZES = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
MIXTURE = {**SIZES, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
REQUESTS = [GenerationRequest((9, 18, 10), SamplingParams(max_new_tokens=16), (1, 2))]


def test_adapters_of_a_mixture_arrive_merged_and_are_refused_by_themselves(
    build: Any, tmp_path: Path, raises: Raises
) -> None:
    folder = tiny_model(architecture="qwen3_moe", **MIXTURE)
    policy = PolicyConfig.model_validate({"model_name": str(folder), **LORA})
    trainer: Any = DTensorConfig().build(policy, WorkerContext(), reference=False)
    generator = torch.Generator().manual_seed(3)
    for parameter in trainer._trainable.values():
        parameter.data.normal_(0, 0.2, generator=generator)
    trainer.save_adapters(tmp_path)
    adapted = PeftModel.from_pretrained(load_reference(folder), str(tmp_path)).eval()
    engine = build(folder, in_process_handle(trainer.export_weights, 1))
    groups = engine.generate(REQUESTS)
    assert max(gaps(adapted, REQUESTS, groups)) < 1e-4
    assert max(gaps(load_reference(folder), REQUESTS, groups)) > 0.1, "the adapters are too small to prove anything"
    apart = WeightHandle(in_process_handle(None, 0).transport, 1, trainer.export_adapters, "adapters")
    with raises(BackendError, "mixtures", "rollouts.adapters", "merged"):
        build(folder, apart, policy=LORA)
