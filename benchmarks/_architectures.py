"""Tiny models of many architectures: random weights, far from uniform log-probs, sizes that all kernels take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}
HEAD = {"head_dim": 32}
UNTIED = {"tie_word_embeddings": False}
FULL = {"num_key_value_heads": 2}
LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2, **UNTIED}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, **UNTIED}
SHARED = {**UNTIED, **FULL, "num_experts_per_tok": 2, "n_routed_experts": 4, "n_shared_experts": 1}
SPARSE = {**SHARED, "first_k_dense_replace": 1, "moe_intermediate_size": 64, "n_group": 1, "topk_group": 1}
LATENT = {"kv_lora_rank": 512, "q_lora_rank": 32, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
STATE = {"state_size": 16, "num_hidden_layers": 2}
SLIDING = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
GPT = {"n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 256, "n_inner": 128}

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": UNTIED,
    "qwen2": {},
    "qwen3": HEAD,
    "smollm3": {},
    "gemma": HEAD,
    "gemma2": {**HEAD, **SLIDING, "query_pre_attn_scalar": 32},
    "gemma3_text": {**HEAD, **SLIDING, "query_pre_attn_scalar": 32},
    "phi": UNTIED,
    "phi3": UNTIED,
    "gpt2": GPT,
    "gpt_bigcode": GPT,
    "gpt_neox": {**UNTIED, **FULL},
    "gptj": {**GPT, "rotary_dim": 16, **UNTIED},
    "opt": {"ffn_dim": 128, "word_embed_proj_dim": 64, **FULL},
    "bloom": {"n_head": 2, "n_layer": 2},
    "falcon": {"num_kv_heads": 1, "multi_query": True, "alibi": False},
    "mpt": {"d_model": 64, "n_heads": 2, "n_layers": 2, "expansion_ratio": 2, "max_seq_len": 256},
    "olmo": {**UNTIED, **FULL},
    "olmo2": UNTIED,
    "olmo3": {**UNTIED, **SLIDING},
    "granite": {},
    "cohere": FULL,
    "cohere2": {**HEAD, **SLIDING},
    "starcoder2": {},
    "stablelm": UNTIED,
    "glm": {**HEAD, **UNTIED},
    "glm4": {**HEAD, **UNTIED},
    "ernie4_5": HEAD,
    "exaone4": {**HEAD, **SLIDING, **UNTIED},
    "nemotron": {**HEAD, **UNTIED},
    "arcee": {**HEAD, **UNTIED},
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 64, "decoder_sparse_step": 1},
    "qwen3_moe": {**EXPERTS, **HEAD, "decoder_sparse_step": 1, "norm_topk_prob": True},
    "mixtral": {**LOCAL, **HEAD},
    "olmoe": {**UNTIED, "num_experts": 4, "num_experts_per_tok": 2},
    "phimoe": LOCAL,
    "granitemoe": {**LOCAL, "tie_word_embeddings": True},
    "gpt_oss": {**LOCAL, **HEAD, "intermediate_size": 64, "layer_types": ["full_attention"] * 2},
    "glm4_moe": {**SPARSE, **HEAD},
    "deepseek_v2": {**SPARSE, **LATENT},
    "deepseek_v3": {**SPARSE, **LATENT, "topk_method": "noaux_tc"},
    "mamba": STATE,
    "mamba2": {**STATE, "num_heads": 4, "head_dim": 32, "n_groups": 1, "expand": 2, "chunk_size": 8},
    "rwkv": {"attention_hidden_size": 64, "num_hidden_layers": 2},
}
"""transformers' ``model_type`` and the sizes of its config that are not those of ``SIZES``."""


def write_architecture(folder: Path, name: str) -> Path:
    """A folder of one of these, with saved weights, every tensor of which differs from what a fresh model has."""
    import torch
    from nemorl_rl.models.tiny import write_tiny_model
    from transformers import AutoConfig, AutoModelForCausalLM

    tiny = write_tiny_model(folder / "tiny", architecture=name, **{**SIZES, **ARCHITECTURES[name]})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tiny), dtype=torch.float32)
    change_all_weights(model, 1)
    model.save_pretrained(folder)
    for file in tiny.glob("*token*"):
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


def change_all_weights(model: Any, seed: int) -> None:
    """Add noise to every parameter, in place."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(noise * (0.1 if parameter.ndim > 1 else 0.05))
