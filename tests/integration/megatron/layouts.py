"""What the tests of ranks say of a layout, by short names; and the mixture of experts that they spread."""

from __future__ import annotations

from typing import Any

# Of the policy
TP: dict[str, Any] = {"tensor_parallel_size": 2}
LOW: dict[str, Any] = {"precision": "bfloat16"}
RECOMPUTED = {"activation_checkpointing": True}
# Of the backend
PP = {"pipeline_parallel_size": 2}
VPP = {**PP, "virtual_pipeline_parallel_size": 2}
CP = {"context_parallel_size": 2}
EP = {"expert_parallel_size": 2}
PLAIN = {"distributed_optimizer": False}
WHOLE = {"sequence_parallel": False}
PADDED = {"layout": "padded"}
SHARED = {"layout": "shared"}

MIXTURE: dict[str, Any] = {
    "architecture": "qwen3_moe",
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
