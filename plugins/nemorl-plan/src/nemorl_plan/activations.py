"""What a forward pass keeps for its backward pass, in bytes per token, read off transformers' and megatron's modules.

# D = hidden size, Q = heads * head size, K = key-value heads * head size, F = width of the MLP, b = bytes of an element

Each term is a tensor that some operation saves; ``tests/unit/plan`` compares their sum with the tensors of real models.
"""

from __future__ import annotations

from dataclasses import dataclass

from nemorl_plan.models import HeldModel

CENTERED = frozenset({"gemma", "gemma2", "gemma3_text"})
"""Architectures whose norms multiply by 1 + weight, in float32 throughout."""
HEAD_NORMS = frozenset({"qwen3", "qwen3_moe", "gemma3_text"})
"""Architectures that normalise each head's query and key."""
FOUR_NORMS = frozenset({"gemma2", "gemma3_text"})
"""Architectures that also normalise what attention and MLP add to the residual."""
EAGER = frozenset({"gemma2"})
"""Architectures whose attention scores are capped, which takes all of them into memory."""


@dataclass(frozen=True)
class PerToken:
    """Bytes per token of one rank's part of a row."""

    layer: float
    """Of one layer, all kept"""
    entry: float
    """Of one layer whose activations are computed again: its input"""
    outside: float
    """After the last layer: its norm, and the states that predict scored tokens"""
    passing: float
    """Gradients within a layer, at the fullest moment of its backward pass"""
    ending: float
    """The same at its end, in the first norm, which transformers computes in float32"""


def norm_bytes(model: HeldModel) -> float:
    """What an RMS norm keeps per element of its input, its output left out.

    transformers computes in float32: x in float32 for the square and the product, then the normalised x that the
    weight multiplies. Fused norms (nemorl-dtensor's on the CPU) keep x alone.
    """
    b, trains_weight = model.element, model.lora_rank == 0
    if model.cpu_kernels:
        return float(b)
    if model.geometry.model_type in CENTERED:
        return 8.0 if trains_weight else 4.0
    return 4.0 + (b if trains_weight else 0)


def dtensor_per_token(model: HeldModel) -> PerToken:
    """Of transformers' modules as nemorl-dtensor runs them."""
    g, b, t = model.geometry, model.element, model.tensor
    kind = g.model_type
    queries, keys = g.heads * g.head_dim, g.cache_width / 2
    split = t if model.sequence_parallel else 1  # norms and residuals along the sequence
    norm = norm_bytes(model)
    # Norms before attention and MLP: kept, and their outputs, which matrices multiply (whole on every rank).
    norms = 2 * (norm * g.hidden / split + 4 + b * g.hidden)
    norms += 2 * (norm * g.hidden + 4) / split if kind in FOUR_NORMS else 0
    heads = (queries + keys) / t
    attention = b * (2 * queries + 2 * keys) / t + 4 * g.heads / t  # q, k, v, output, log-sum-exp
    attention += norm * heads + 4 * (g.heads + g.kv_heads) / t if kind in HEAD_NORMS else 0
    if kind in EAGER:  # scores capped, in float32 after softmax, and rounded
        attention += g.heads / t * model.width * (2 * b + 4)
    dense, mixture = 4 * b * g.ffn / t, _mixture(model)
    share = g.mixture_layers / g.layers
    mlp = dense * (1 - share) + mixture * share
    predicted = b * g.hidden
    return PerToken(
        layer=norms + attention + mlp,
        entry=b * g.hidden / split,
        outside=norm * g.hidden / split + 4 + predicted,
        passing=b * (2 * max(g.ffn, g.experts_per_token * g.expert_ffn) / t + g.hidden),
        ending=24 * g.hidden / split,
    )


def _mixture(model: HeldModel) -> float:
    """Of the grouped product of experts: inputs and outputs of each, gate and up in one, their parts, and routing."""
    g, b = model.geometry, model.element
    if not g.experts:
        return 0.0
    experts = g.experts_per_token * b * (4 * g.expert_ffn + 2 * g.hidden)
    routing = 4 * g.experts + g.experts_per_token * (8 + 3 * 8 + 4 + 4) + 4
    return experts + routing + 4 * b * g.shared_ffn


def megatron_per_token(model: HeldModel) -> PerToken:
    """Of megatron-core's transformer layer, by the terms of arXiv:2205.05198, section 4, without dropout.

    With sequence parallelism norms' inputs and their outputs are divided too. SwiGLU keeps gate, up, the activated gate
    and the product, where the paper's GeLU keeps 4 D in and out.
    """
    g, b, t = model.geometry, model.element, model.tensor
    queries, keys = g.heads * g.head_dim, g.cache_width / 2
    split = t if model.sequence_parallel else 1
    norms = 2 * (b * g.hidden + b * g.hidden) / split
    attention = b * (2 * queries + 2 * keys) / t + 4 * g.heads / t
    dense = 4 * b * g.ffn / t
    routed = g.experts_per_token * b * (4 * g.expert_ffn / model.expert_tensor + 2 * g.hidden / split)
    share = g.mixture_layers / g.layers
    return PerToken(
        layer=norms + attention + dense * (1 - share) + (routed + 8 * g.experts) * share,
        entry=b * g.hidden / split,
        outside=b * g.hidden / split + 2 * b * g.hidden,
        passing=b * (2 * max(g.ffn, g.experts_per_token * g.expert_ffn) / t + g.hidden),
        ending=3 * b * g.hidden / split,
    )
