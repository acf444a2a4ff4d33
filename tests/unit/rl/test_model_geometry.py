"""Sizes of models, against transformers' own models and against FLOPs worked out by hand."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
import torch
from nemorl.errors import UsageError
from nemorl_rl.models.model_geometry import KNOWN_TYPES, Geometry

SMALL = {"hidden_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
SIZES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 48, "n_layer": 3, "n_head": 4, "n_positions": 64},
    "qwen2_moe": {**SMALL, "intermediate_size": 80, "moe_intermediate_size": 24, "num_experts": 6},
    "qwen3_moe": {**SMALL, "intermediate_size": 80, "moe_intermediate_size": 24, "num_experts": 6, "head_dim": 16},
    "mixtral": {**SMALL, "intermediate_size": 80, "num_local_experts": 5},
    "deepseek_v3": {
        **SMALL,
        **{"num_key_value_heads": 4, "intermediate_size": 80, "moe_intermediate_size": 24, "n_routed_experts": 8},
        **{"q_lora_rank": 20, "kv_lora_rank": 12, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 12},
        **{"first_k_dense_replace": 2, "n_group": 2, "topk_group": 1},
    },
}


def made(kind: str, **further: Any) -> tuple[dict[str, Any], Any]:
    """The config of a small model, as its ``config.json`` has it, and the model without memory."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = SIZES.get(kind, {**SMALL, "intermediate_size": 80})
    config = AutoConfig.for_model(kind, vocab_size=320, pad_token_id=0, **{**sizes, **further})
    with torch.device("meta"):
        return config.to_diff_dict(), AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("kind", sorted(KNOWN_TYPES))
@pytest.mark.parametrize("tied", [True, False])
def test_parameters_are_those_of_the_model_that_transformers_builds(kind: str, tied: bool) -> None:
    config, model = made(kind, tie_word_embeddings=tied)
    geometry = Geometry.from_config(config)
    assert geometry.is_exact
    assert geometry.parameters() == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("kind", ["llama", "granite"])
def test_biases_count(kind: str) -> None:
    config, model = made(kind, attention_bias=True, mlp_bias=True, tie_word_embeddings=False)
    assert Geometry.from_config(config).parameters() == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "gemma", "phi3", "gpt2"])
def test_forward_flops_are_those_that_torch_counts(kind: str) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    config, skeleton = made(kind, tie_word_embeddings=False)
    model = type(skeleton)._from_config(skeleton.config, attn_implementation="eager")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=torch.zeros((2, 10), dtype=torch.int64), use_cache=False)
    # Eager attention computes all pairs, also those that the mask removes: 10^2 instead of 10^2 / 2 a sequence.
    found = Geometry.from_config(config).forward_flops(20, 20, 2 * 2 * 10**2)
    # What torch counts besides are the angles of the rotation, one product of D / 2 per position.
    assert counter.get_total_flops() == pytest.approx(found, rel=1e-3)


def test_flops_of_llama_3_8b_are_its_parameters_twice_and_attention() -> None:
    llama = Geometry.from_config(
        {
            **{"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32},
            **{"num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256},
        }
    )
    assert llama.parameters() == 8_030_261_248  # what the model card's safetensors hold
    assert llama.cache_elements == 32 * 2 * 8 * 128
    # Layers: 32 * (4096 * (2 * 4096 + 2 * 1024) + 3 * 4096 * 14336) = 6,979,321,856 elements, head 525,336,576.
    assert llama.active_parameters == 6_979_321_856
    # 100 tokens in one sequence: pairs 100^2 / 2, each 4 * 32 * 128 FLOPs in 32 layers.
    attention = 32 * 4 * 32 * 128 * 100**2 / 2
    assert llama.forward_flops(100, 60, 100**2) == 200 * 6_979_321_856 + 120 * 525_336_576 + attention
    assert llama.training_flops(100, 60, 100**2) == 3 * llama.forward_flops(100, 60, 100**2)


def test_a_token_of_a_mixture_passes_its_own_experts_only() -> None:
    mixtral = Geometry.from_config(
        {
            **{"model_type": "mixtral", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32},
            **{"num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 32000},
            **{"num_local_experts": 8, "num_experts_per_tok": 2},
        }
    )
    assert mixtral.parameters() == 46_702_792_704  # arXiv:2401.04088: 47B, of which a token uses 13B
    active = mixtral.active_parameters + 2 * mixtral.embedding_parameters
    assert active / 1e9 == pytest.approx(12.9, abs=0.05)
    assert mixtral.expert_parameters == 32 * 8 * 3 * 4096 * 14336


def test_a_sliding_window_bounds_the_attention_of_its_layers() -> None:
    config, _ = made("gemma2", sliding_window=4, head_dim=8)
    geometry = Geometry.from_config(config)
    assert (geometry.window, geometry.window_layers) == (4, 2)
    # 100 tokens: 5,000 pairs in the two full layers, at most 100 * 4 in the other two; 4 heads of 8 + 8.
    assert geometry.attention_flops(100, 5000) == 2 * 4 * 16 * (2 * 5000 + 2 * 400)


def test_the_language_model_of_a_multimodal_config_is_taken() -> None:
    text, _ = made("qwen2", tie_word_embeddings=True)
    outer = {"model_type": "qwen2_vl", "text_config": text, "vision_config": {"hidden_size": 8}}
    assert Geometry.from_config(outer) == Geometry.from_config(text)


def test_a_value_head_is_one_row() -> None:
    config, _ = made("llama", tie_word_embeddings=False)
    geometry = Geometry.from_config(config)
    assert geometry.parameters() - geometry.parameters(value_head=True) == 320 * 48 - 48


def test_a_config_without_sizes_is_refused_by_name(raises: Any) -> None:
    with raises(UsageError, "num_attention_heads", "mamba"):
        Geometry.from_config({"model_type": "mamba", "hidden_size": 8, "num_hidden_layers": 2, "vocab_size": 9})


@pytest.mark.parametrize("kind", sorted(KNOWN_TYPES))
def test_a_value_that_is_no_size_is_told_as_an_error_of_usage(kind: str) -> None:
    config, _ = made(kind)
    for key in config:
        for value in ([24, 48], "many", {"a": 1}, -1, 0, 0.5):
            with suppress(UsageError):
                Geometry.from_config({**config, key: value})
        with suppress(UsageError):
            Geometry.from_config({name: kept for name, kept in config.items() if name != key})
