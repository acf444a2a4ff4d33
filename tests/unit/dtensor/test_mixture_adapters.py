"""Adapters of mixtures of experts: ``all-linear`` is what every token passes, and peft reads it back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from nemorl.config import PolicyConfig
from nemorl.errors import BackendError
from nemorl.resources.worker import WorkerContext
from nemorl_dtensor import DTensorConfig
from nemorl_dtensor.training import DTensorBackend
from nemorl_rl.models.tiny import write_tiny_model
from nemorl_tensors import TokenBatch
from peft import PeftModel
from recorded_messages import Raises
from transformers import AutoModelForCausalLM

from .conftest import plain_logprobs

ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
LATENT = {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"}
SHARED = {"gate_proj", "up_proj", "down_proj"}
ROUTED = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
DENSE_FIRST = {**ROUTED, "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1}
MIXTURES: dict[str, tuple[dict[str, Any], set[str]]] = {
    "qwen3_moe": ({**ROUTED, "num_experts": 4, "head_dim": 8}, ATTENTION),
    "mixtral": ({"num_local_experts": 4}, ATTENTION),
    "olmoe": ({"num_experts": 4, "num_experts_per_tok": 2}, ATTENTION),
    "qwen2_moe": ({**ROUTED, "num_experts": 4, "shared_expert_intermediate_size": 32}, ATTENTION | SHARED),
    "granitemoe": ({"num_local_experts": 4, "num_experts_per_tok": 2}, ATTENTION),
    "phimoe": ({"num_local_experts": 4, "num_experts_per_tok": 2}, ATTENTION),  # its router is a linear layer
    "gpt_oss": ({"num_local_experts": 4, "head_dim": 8, "layer_types": ["full_attention"] * 2}, ATTENTION),
    # peft takes the layers of these that are called as experts once were for experts.
    "glm4_moe": ({**DENSE_FIRST, "topk_group": 1, "head_dim": 8}, ATTENTION),
    "deepseek_v3": (
        {**DENSE_FIRST, "topk_group": 1, "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 8}
        | {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8},
        LATENT,
    ),
}


def _built(folder: Path, architecture: str, **lora: Any) -> DTensorBackend:
    """A backend whose base weights are saved in ``folder``."""
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64}
    write_tiny_model(folder / "tiny", architecture=architecture, **{**sizes, **MIXTURES[architecture][0]})
    policy = PolicyConfig(model_name=str(folder / "tiny"), init="random")
    plain = DTensorBackend(policy, WorkerContext(), DTensorConfig(), reference=False, head="language_model")
    plain.save_pretrained(folder / "base")
    config = {"rank": 4, "alpha": 12.0, **lora}
    adapted = PolicyConfig.model_validate(
        {"model_name": str(folder / "base"), "lora": config, "optimizer": {"lr": 0.03}}
    )
    return DTensorBackend(adapted, WorkerContext(), DTensorConfig(), reference=False, head="language_model")


@pytest.mark.parametrize("architecture", MIXTURES)
def test_the_default_adapts_what_every_token_passes(
    architecture: str, batch: TokenBatch, weighted_nll: Any, tmp_path: Path
) -> None:
    backend = _built(tmp_path, architecture)
    for _ in range(2):
        backend.train_step(batch, weighted_nll)
    exported = {name for bucket in backend.export_adapters() for name in bucket}
    assert {name.split(".")[-3] for name in exported} == MIXTURES[architecture][1]
    backend.save_adapters(tmp_path / "adapters")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    without = plain_logprobs(base, batch)
    adapted = plain_logprobs(PeftModel.from_pretrained(base, str(tmp_path / "adapters")).eval(), batch)
    ours = backend.get_logprobs(batch)
    assert (ours - without).abs().max() > 0.01, "the adapters change what the model says"
    torch.testing.assert_close(adapted, ours, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["gate_proj", "gate"])
def test_experts_and_routers_that_are_asked_for_by_name_are_refused(name: str, tmp_path: Path, raises: Raises) -> None:
    names = {"gate_proj": ["q_proj", "gate_proj", "up_proj", "down_proj"], "gate": ["q_proj", "gate"]}[name]
    with raises(BackendError, "experts", "all-linear"):
        _built(tmp_path, "qwen3_moe", target_modules=names)
