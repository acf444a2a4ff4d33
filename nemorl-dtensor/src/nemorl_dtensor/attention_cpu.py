"""Attention on the CPU by batched matrix products, forward and backward, for models of transformers.

# B = sequences, H = query heads, K = key-value heads, G = H / K, T = queries of a row, S = its keys, C = queries of a
# block, E = keys that a block sees, d = head size

torch's flash attention multiplies tiles of 64 x 64, far below what its batched product reaches. Here queries are taken
in blocks; causal ones see the keys up to their last query, so that the upper triangle is never computed. The G query
heads that share keys are rows of one product, so that keys are not repeated. Scores are float32 whatever the precision
of the model. What they become, in that of the model, is kept for the backward pass up to ``KEPT_BYTES``; beyond, it is
computed again and nothing of ``T x S`` is kept.

Measured (AMD EPYC with AVX-512, one thread, H = 9, K = 3, d = 64, 1,536 tokens; forward + backward ms of a layer, flash
against this): bfloat16 rows of 32 tokens 23.6 / 4.8, 128 32.4 / 10.7, 384 48.9 / 22.1, 1536 110 / 80; float32 32 8.1 /
8.7, 128 20.5 / 18.9, 384 53.8 / 40.8, 1536 137 / 130.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

NAME = "nemorl_cpu"
"""In transformers' registry of attention functions"""
BLOCK_QUERIES = 64
"""Larger blocks compute more of the upper triangle and leave the cache; smaller ones make the products thin."""

KEPT_BYTES = 32 << 20
"""Of a layer and microbatch; four rows of 384 tokens and nine heads are 8 MiB in bfloat16. To compute it again makes
attention take half as long again in bfloat16, as scores are float32 and so MKL's, and a quarter longer in float32."""


def use_fast_attention(model: Any) -> None:
    """Have a model on the CPU whose attention is torch's compute it by :func:`attention` where that applies."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    if model.device.type != "cpu" or model.config._attn_implementation != "sdpa":
        return
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    model.set_attn_implementation(NAME)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' interface. What is not plain causal attention over whole rows goes to its own function."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    is_plain = attention_mask is None and not dropout and causal and kwargs.get("position_bias") is None
    if is_plain and 1 < query.shape[2] == key.shape[2] and query.dtype in (torch.float32, torch.bfloat16):
        return attention(query, key, value, None, scaling), None
    found: tuple[Tensor, None] = sdpa_attention_forward(
        module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **kwargs
    )
    return found


def attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, scale: float | None = None
) -> Tensor:
    """Attention as torch's ``scaled_dot_product_attention`` has it, differentiable but for the mask.

    Args:
        query: [B, H, T, d], any strides, as the others.
        key: [B, K, S, d] with H a multiple of K.
        value: [B, K, S, d'].
        mask: [B or 1, 1, T, S] added to the scores, each row of which leaves a key; ``None``: causal, and S = T.
        scale: Factor of the scores; 1 / sqrt(d) where it is ``None``.

    Returns:
        [B, T, H, d'] of the dtype of ``query``, contiguous.
    """
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    if torch.is_grad_enabled():
        result: Tensor = _Attention.apply(query, key, value, mask, factor)  # type: ignore[no-untyped-call]
        return result
    return _forward(query, key, value, mask, factor)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
        ctx.save_for_backward(query, key, value, mask)
        ctx.scale = scale
        ctx.kept = [] if _kept_bytes(query, key, mask) <= KEPT_BYTES else None
        return _forward(query, key, value, mask, scale, ctx.kept)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, mask = ctx.saved_tensors
        blocks = _blocks(query, key, mask, ctx.scale) if ctx.kept is None else iter(ctx.kept)
        ctx.kept = None
        return *_backward(grads[0], query, key, value, ctx.scale, blocks), None, None


class _Block(NamedTuple):
    """Some queries of all rows."""

    places: slice
    probs: Tensor
    """[B * K, G * C, E] what they attend to"""
    rows: Tensor
    """[B * K, G * C, d] they"""


def _kept_bytes(query: Tensor, key: Tensor, mask: Tensor | None) -> int:
    """Of all blocks, about."""
    columns = (query.shape[2] + BLOCK_QUERIES) // 2 if mask is None else key.shape[2]
    return query.nbytes + query.nbytes // query.shape[-1] * columns


def _forward(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, kept: list[_Block] | None = None
) -> Tensor:
    count, heads, tokens, _ = query.shape
    kv_heads = key.shape[1]
    out = query.new_empty(count, tokens, heads, value.shape[-1])
    out_BTKGd = out.view(count, tokens, kv_heads, -1, value.shape[-1])
    values_NSd = value.flatten(0, 1)
    for block in _blocks(query, key, mask, scale):
        mixed_NRd = torch.bmm(block.probs, values_NSd[:, : block.probs.shape[-1]])
        out_BTKGd[:, block.places] = _by_token(mixed_NRd, count, kv_heads, block.places)
        if kept is not None:
            kept.append(block)
    return out


def _backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, scale: float, blocks: Iterator[_Block]
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of ``query``, ``key`` and ``value``, in their shapes, from ``grad`` [B, T, H, d'] of the output."""
    count, heads, tokens, size = query.shape
    kv_heads = key.shape[1]
    wide = torch.promote_types(query.dtype, torch.float32)
    keys_NSd, values_NSd = key.flatten(0, 1), value.flatten(0, 1)
    grad_BKGTd = grad.view(count, tokens, kv_heads, -1, value.shape[-1]).permute(0, 2, 3, 1, 4)
    dq = query.new_empty(count, tokens, heads, size)
    dq_BTKGd = dq.view(count, tokens, kv_heads, -1, size)
    # Blocks add up in float32.
    dk_NSd, dv_NSd = torch.zeros_like(keys_NSd, dtype=wide), torch.zeros_like(values_NSd, dtype=wide)
    for block, probs_NRE, rows_NRd in blocks:
        seen = slice(0, probs_NRE.shape[-1])
        grad_NRd = grad_BKGTd[:, :, :, block].reshape(count * kv_heads, -1, value.shape[-1])
        dv_NSd[:, seen] += torch.bmm(probs_NRE.transpose(1, 2), grad_NRd)
        dp_NRE = torch.bmm(grad_NRd, values_NSd[:, seen].transpose(1, 2))
        ds_NRE = torch._softmax_backward_data(dp_NRE, probs_NRE, -1, dp_NRE.dtype)
        dq_NRd = torch.bmm(ds_NRE, keys_NSd[:, seen]).mul_(scale)
        dq_BTKGd[:, block] = _by_token(dq_NRd, count, kv_heads, block)
        dk_NSd[:, seen] += torch.bmm(ds_NRE.transpose(1, 2), rows_NRd)
    return (
        dq.transpose(1, 2),
        dk_NSd.mul_(scale).to(key.dtype).view(key.shape),
        dv_NSd.to(value.dtype).view(value.shape),
    )


def _blocks(query: Tensor, key: Tensor, mask: Tensor | None, scale: float) -> Iterator[_Block]:
    """Queries block by block."""
    count, heads, tokens, size = query.shape
    kv_heads = key.shape[1]
    wide = torch.promote_types(query.dtype, torch.float32)
    query_BKGTd = query.view(count, kv_heads, -1, tokens, size)
    keys_NdS = key.to(wide).mul(scale).flatten(0, 1).transpose(1, 2)
    triangle_CC = torch.full((BLOCK_QUERIES, BLOCK_QUERIES), -torch.inf, dtype=wide).triu_(1)
    for start in range(0, tokens, BLOCK_QUERIES):
        block = slice(start, min(start + BLOCK_QUERIES, tokens))
        width, seen = block.stop - start, block.stop if mask is None else key.shape[2]
        rows_NRd = query_BKGTd[:, :, :, block].flatten(2, 3).flatten(0, 1)
        scores_NRE = torch.bmm(rows_NRd.to(wide), keys_NdS[:, :, :seen])
        scores_BHCE = scores_NRE.view(count, heads, width, seen)
        if mask is None:
            scores_BHCE[..., start:] += triangle_CC[:width, :width]
        else:
            scores_BHCE += mask[:, :, block]
        yield _Block(block, torch.softmax(scores_NRE, -1).to(query.dtype), rows_NRd)


def _by_token(rows_NRd: Tensor, count: int, kv_heads: int, block: slice) -> Tensor:
    """[B * K, G * C, d] as [B, C, K, G, d]."""
    width = block.stop - block.start
    return rows_NRd.view(count, kv_heads, -1, width, rows_NRd.shape[-1]).permute(0, 3, 1, 2, 4)
