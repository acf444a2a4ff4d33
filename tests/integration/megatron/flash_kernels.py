"""flash-attention's two kernels as megatron-core calls them, written out in PyTorch: the real ones run on CUDA only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import torch
from megatron.core.inference.contexts import dynamic_context
from megatron.core.transformer import attention
from nemorl_megatron import paged
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention


def attend(query: Tensor, keys: Tensor, values: Tensor, blocks: Tensor, seen: int) -> Tensor:
    """[S, n, D] of the last S of a row's ``seen`` tokens, whose keys [blocks, tokens, g, D] lie in ``blocks``."""
    if not seen:
        return torch.zeros_like(query)  # padding
    key, value = (cache[blocks.long()].flatten(0, 1)[:seen].transpose(0, 1) for cache in (keys, values))
    mask = causal_lower_right(len(query), seen)
    return scaled_dot_product_attention(query.transpose(0, 1), key, value, mask, enable_gqa=True).transpose(0, 1)


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, **named: Any
) -> Tensor:
    assert named["causal"]
    assert named["softmax_scale"] == q.shape[-1] ** -0.5
    found = torch.zeros_like(q)
    spans = zip(pairwise(cu_q.tolist()), pairwise(cu_k.tolist()), named["block_table"], strict=True)
    for (start, stop), (first, last), blocks in spans:
        if start < stop:
            assert stop - start <= max_q
            assert last - first <= max_k
            found[start:stop] = attend(q[start:stop], k, v, blocks, last - first)
    return found


def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, cache_seqlens: Tensor, block_table: Tensor, **named: Any
) -> Tensor:
    assert named["causal"]
    rows = zip(q, block_table, cache_seqlens.tolist(), strict=True)
    return torch.stack([attend(query, k_cache, v_cache, blocks, seen) for query, blocks, seen in rows])


@contextmanager
def flash_kernels_on_cpu() -> Iterator[None]:
    """Within the block megatron-core's paged cache works without CUDA."""
    with (
        patch.object(attention, "flash_attn_varlen_func", flash_attn_varlen_func),
        patch.object(attention, "flash_attn_with_kvcache", flash_attn_with_kvcache),
        patch.object(attention, "is_fa_min_version", lambda _: True),
        patch.object(dynamic_context, "triton_append_key_value_cache", None),
        patch.object(paged, "has_flash_attention", lambda _: True),
    ):
        yield
