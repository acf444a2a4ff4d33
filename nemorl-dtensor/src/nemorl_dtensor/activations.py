"""Memory that a forward pass keeps for its backward pass, in bytes per token, read off transformers' modules.

# D = hidden size, Q = heads * head size, K = key-value heads * head size, F = width of the MLP, b = bytes of an element

Each term is a tensor that some operation saves; ``tests/unit/plan`` compares their sum with the tensors of real models.
"""

from __future__ import annotations

from math import lcm

from nemorl_rl.planning.memory.describing import PerToken
from nemorl_rl.planning.memory.models import HeldModel

CENTERED = frozenset({"gemma", "gemma2", "gemma3_text"})
"""Architectures whose norms multiply by 1 + weight, in float32 throughout."""
HEAD_NORMS = frozenset({"qwen3", "qwen3_moe", "gemma3_text"})
"""Architectures that normalise each head's query and key."""
FOUR_NORMS = frozenset({"gemma2", "gemma3_text"})
"""Architectures that also normalise what attention and MLP add to the residual."""
EAGER = frozenset({"gemma2"})
"""Architectures whose attention scores are capped, which takes all of them into memory."""


def norm_bytes(model: HeldModel, *, fused: bool) -> float:
    """Bytes that an RMS norm keeps per element of its input, its output left out.

    transformers computes in float32: x in float32 for the square and the product, then the normalised x that the
    weight multiplies. Fused norms (nemorl-dtensor's on the CPU) keep x alone.
    """
    b, trains_weight = model.element, model.lora_rank == 0
    if fused:
        return float(b)
    if model.geometry.model_type in CENTERED:
        return 8.0 if trains_weight else 4.0
    return 4.0 + (b if trains_weight else 0)


def per_token(model: HeldModel, *, sequence_parallel: bool, fused: bool, by_ring: bool = False) -> PerToken:
    """Of transformers' modules as this package runs them.

    Args:
        model: Its sizes.
        sequence_parallel: Norms and residuals are divided over tensor-parallel ranks.
        fused: Norms are one function.
        by_ring: Ranks that share sequences send keys and values round, which nobody keeps.
    """
    g, b, t = model.geometry, model.element, model.tensor
    kind = g.model_type
    queries, keys = g.heads * g.head_dim, g.cache_width / 2
    split = t if sequence_parallel else 1  # norms and residuals along the sequence
    norm = norm_bytes(model, fused=fused)
    # Norms before attention and MLP: kept, and their outputs, which matrices multiply (whole on every rank).
    norms = 2 * (norm * g.hidden / split + 4 + b * g.hidden)
    norms += 2 * (norm * g.hidden + 4) / split if kind in FOUR_NORMS else 0
    heads = (queries + keys) / t
    attention = b * (2 * queries + 2 * keys) / t + 4 * g.heads / t  # q, k, v, output, log-sum-exp
    attention += norm * heads + 4 * (g.heads + g.kv_heads) / t if kind in HEAD_NORMS else 0
    if model.spread.context > 1 and not by_ring:
        # The output once more, as the other ranks send it; keys and values as often as needed.
        copies = lcm(g.kv_heads, t * model.spread.context) / g.kv_heads
        attention += b * (queries + 2 * keys * (copies - 1)) / t
    if kind in EAGER:  # scores capped, in float32 after softmax, and rounded
        attention += g.heads / t * model.width * (2 * b + 4)
    dense, mixture = 4 * b * g.ffn / t, _mixture(model) / split  # whose ranks have other tokens each
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
