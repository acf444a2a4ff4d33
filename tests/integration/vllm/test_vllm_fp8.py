"""FP8 rollouts. vLLM's block-wise kernels want a GPU; its channel-wise rounding runs on any CPU, loaders and all."""

from __future__ import annotations

import copy
from statistics import mean
from typing import Any

import pytest
import torch
from nemorl.config import PolicyConfig
from nemorl.resources.worker import WorkerContext
from nemorl.types import GenerationRequest, SamplingParams
from nemorl_testing.models import load_reference, tiny_model
from vllm_engines import changed, gaps, handle_of

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
BFLOAT16 = {"precision": "bfloat16"}
REQUESTS = [
    GenerationRequest(ids, SamplingParams(max_new_tokens=16), (1, 2, 3)) for ids in ((9, 18, 10), (11, 12, 13, 14))
]
SMALLEST_STEP = 2**-4
"""Of FP8 with 3 bits of mantissa, relative: what rounding to nearest may be off by."""


@pytest.fixture
def by_channel(monkeypatch: pytest.MonkeyPatch) -> None:
    """``precision: fp8`` is the kind of FP8 that vLLM 0.32 computes on a CPU."""
    from nemorl_vllm import engine

    monkeypatch.setitem(engine.QUANTIZATION, "fp8", "fp8_per_channel")


def weight_of(engine: Any, name: str) -> torch.Tensor:
    """A linear layer's [out, in] weight as the engine multiplies with it."""

    def read(worker: Any) -> torch.Tensor:
        layer = worker.model_runner.model.get_submodule(name)
        assert layer.weight.dtype == torch.float8_e4m3fn
        weight: torch.Tensor = layer.weight.float().cpu()
        scale = layer.weight_scale.float().cpu().flatten()
        return weight.t() * scale[:, None] if weight.shape[1] == len(scale) else weight * scale[:, None]

    (found,) = engine._call(lambda inner: inner.collective_rpc(read))
    return found


def test_the_engine_knows_what_precision_asks_for() -> None:
    from nemorl_vllm.engine import QUANTIZATION
    from vllm.config.quantization import resolve_quantization_config

    found = resolve_quantization_config(QUANTIZATION["fp8"], None)
    assert found is not None
    assert found.linear.weight.dtype == torch.float8_e4m3fn
    assert found.linear.weight.scale.group_shape == (128, 128)
    assert found.moe == found.linear


def test_the_engine_knows_mxfp8_too() -> None:
    from nemorl_vllm.engine import QUANTIZATION
    from vllm.config.quantization import resolve_quantization_config

    found = resolve_quantization_config(QUANTIZATION["mxfp8"], {"ignore": ["*.layers.0.*"]})
    assert found is not None
    assert found.linear.weight.scale.group_shape == (1, 32)
    assert found.moe == found.linear
    assert found.ignore == ["*.layers.0.*"]


@pytest.mark.usefixtures("by_channel")
def test_layers_that_are_kept_stay_as_they_come_over_an_update(build: Any) -> None:
    folder = tiny_model(**SIZES, num_hidden_layers=3)
    kept = {"first": 1, "names": ["down_proj"]}
    engine = build(folder, policy=BFLOAT16, precision="fp8", kept_layers=kept)
    model = changed(load_reference(folder), seed=1)
    engine.update_weights(handle_of(model, 1), 1)

    def types(worker: Any) -> dict[str, torch.dtype]:
        layers = worker.model_runner.model.named_modules()
        return {
            name: layer.weight.dtype for name, layer in layers if name.endswith(("qkv_proj", "o_proj", "down_proj"))
        }

    (found,) = engine._call(lambda inner: inner.collective_rpc(types))
    rounded = {name for name, dtype in found.items() if dtype == torch.float8_e4m3fn}
    assert rounded == {f"model.layers.{block}.self_attn.{name}" for block in (1, 2) for name in ("qkv_proj", "o_proj")}
    assert 1e-4 < mean(gaps(model, REQUESTS, engine.generate(REQUESTS))) < 0.5


@pytest.mark.full
@pytest.mark.usefixtures("by_channel")
def test_every_update_is_rounded_anew(build: Any) -> None:
    folder = tiny_model(**SIZES)
    engine = build(folder, policy=BFLOAT16, precision="fp8")
    model = load_reference(folder)
    for version in range(3):
        before = copy.deepcopy(model)
        if version:
            changed(model, seed=version)
            engine.update_weights(handle_of(model, version), version)
        wanted = model.get_submodule("model.layers.1.mlp.down_proj").weight.detach().bfloat16().float()
        found = weight_of(engine, "model.layers.1.mlp.down_proj")
        largest = wanted.abs().amax(1, keepdim=True)
        assert float(((found - wanted).abs() / largest).max()) < SMALLEST_STEP
        assert not found.equal(wanted)
        groups = engine.generate(REQUESTS)
        error = mean(gaps(model, REQUESTS, groups))
        assert 1e-4 < error < 0.5  # it is the new model, and it is rounded
        if version:
            assert mean(gaps(before, REQUESTS, groups)) > 4 * error
        assert {c.weight_versions for group in groups for c in group} == {(version,)}


@pytest.mark.usefixtures("by_channel")
def test_an_update_leaves_what_a_new_engine_would_have(build: Any, tmp_path: Any) -> None:
    folder = tiny_model(**SIZES)
    model = changed(load_reference(folder), seed=5)
    updated = build(folder, policy=BFLOAT16, precision="fp8")
    updated.update_weights(handle_of(model, 1), 1)
    fresh = build(folder, handle_of(model, 1), policy=BFLOAT16, precision="fp8")
    answers = [[(c.token_ids, c.logprobs) for group in e.generate(REQUESTS) for c in group] for e in (updated, fresh)]
    assert answers[0] == answers[1]


@pytest.mark.gpu
def test_block_wise_fp8_follows_its_trainer_on_a_gpu() -> None:
    pytest.importorskip("vllm.platforms", reason="vLLM is not installed")  # `vllm` alone may be this folder
    from nemorl_vllm.config import VLLMConfig
    from nemorl_vllm.generation import VLLMGeneration

    folder = tiny_model(hidden_size=256, intermediate_size=512)
    policy = PolicyConfig(model_name=str(folder), max_sequence_tokens=256, precision="bfloat16")
    options = VLLMConfig(precision="fp8", kv_cache_gib=1.0)
    engine = VLLMGeneration(policy, WorkerContext(device="cuda:0"), None, options)
    model = load_reference(folder)
    try:
        for version in (1, 2):
            changed(model, seed=version)
            engine.update_weights(handle_of(model, version), version)
            error = mean(gaps(model, REQUESTS, engine.generate(REQUESTS)))
            assert 1e-4 < error < 0.2
    finally:
        engine.shutdown()
