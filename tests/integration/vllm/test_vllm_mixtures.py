"""Mixtures in vLLM: experts are repacked at every update, from the names under which trainers export them."""

from __future__ import annotations

from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch
from nemorl.config import PolicyConfig
from nemorl.resources.worker import WorkerContext
from nemorl.types import GenerationRequest, SamplingParams
from nemorl.weights import in_process_handle
from nemorl_dtensor.config import DTensorConfig
from nemorl_dtensor.training import DTensorBackend
from nemorl_rl.models.tiny import write_tiny_model
from nemorl_testing.models import load_reference
from vllm_engines import changed, gaps

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

SIZES = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
ARCHITECTURES = {
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
    # 80 is no multiple of the 32 that vLLM's kernel wants: experts are padded before they are packed.
    "mixtral": {**EXPERTS, "intermediate_size": 80},
    # Its experts, their biases and its attention sinks are loaded past vLLM's own bookkeeping.
    "gpt_oss": {
        **EXPERTS,
        "intermediate_size": 64,
        "tie_word_embeddings": False,
        "layer_types": ["full_attention"] * 2,
    },
}
REQUESTS = [
    GenerationRequest(ids, SamplingParams(max_new_tokens=16), (1, 2)) for ids in ((9, 18, 10), (11, 12, 13, 14))
]
TOLERANCE = 1e-4


def _trainer(folder: Path, architecture: str, sizes: dict[str, Any]) -> DTensorBackend:
    """A trainer of random weights, which it has saved into ``folder``."""
    write_tiny_model(folder / "tiny", architecture=architecture, **{**SIZES, **sizes})
    policy = PolicyConfig(model_name=str(folder / "tiny"), init="random")
    trainer = DTensorBackend(policy, WorkerContext(), DTensorConfig(), reference=False, head="language_model")
    changed(trainer._model, seed=3)
    trainer.save_pretrained(folder)
    return trainer


@pytest.mark.usefixtures("generator")  # an engine of another kind came first, and vLLM makes groups once per process
@pytest.mark.full
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_saved_mixtures_load_and_every_update_reaches_the_experts(
    architecture: str, build: Any, tmp_path: Path
) -> None:
    trainer = _trainer(tmp_path, architecture, ARCHITECTURES[architecture])
    engine, model = build(tmp_path), trainer._model
    assert max(gaps(model, REQUESTS, engine.generate(REQUESTS))) < TOLERANCE
    for version in (1, 2):
        changed(model, seed=version)
        engine.update_weights(in_process_handle(trainer.export_weights, version), version)
        assert max(gaps(model, REQUESTS, engine.generate(REQUESTS))) < TOLERANCE
    with torch.no_grad():  # the experts alone, so that nothing else can hide that they did not arrive
        for name, parameter in model.named_parameters():
            parameter.mul_(1 + 2 * ("experts" in name))
    groups = engine.generate(REQUESTS)
    assert mean(gaps(model, REQUESTS, groups)) > 0.01, "the change is too small to prove anything"
    engine.update_weights(in_process_handle(trainer.export_weights, 3), 3)
    assert max(gaps(model, REQUESTS, engine.generate(REQUESTS))) < TOLERANCE


@pytest.mark.full
def test_transformers_classes_stay_usable_beside_an_engine_that_runs_them(build: Any, tmp_path: Path) -> None:
    # vLLM has no code of its own for OLMo 2 and runs transformers' classes, which the trainer uses as well.
    trainer = _trainer(tmp_path, "olmo2", {"tie_word_embeddings": False})
    engine = build(tmp_path)
    assert max(gaps(trainer._model, REQUESTS, engine.generate(REQUESTS))) < TOLERANCE
    changed(trainer._model, seed=2)
    engine.update_weights(in_process_handle(trainer.export_weights, 1), 1)
    groups = engine.generate(REQUESTS)
    assert max(gaps(trainer._model, REQUESTS, groups)) < TOLERANCE
    assert mean(gaps(load_reference(tmp_path), REQUESTS, groups)) > 0.1
