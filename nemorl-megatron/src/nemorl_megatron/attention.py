"""Scaled dot-product attention over the layouts that the policy uses: the place where a layout is added.

# S = tokens of a row, B = rows, n = query heads of this rank, g = key-value heads of this rank, D = head size

Layout ``sbhd``: rows of one sequence each, padded at the end. Attention is causal, so real tokens never see padding,
and what padding computes is not read: no mask is needed. Heads have been divided over tensor-parallel ranks before.

Layout ``thd``: one row of many sequences (``packing``), each attended to by itself. On CUDA one kernel serves them all
where PyTorch has it for the type and the scores; elsewhere each sequence is a call. Sequences of the row may share
tokens (``nemorl_tensors.engines.tree_attention``).

With context parallelism each rank has two chunks of every row (``context``); keys and values of all are brought
together, and a chunk of queries sees those up to its own end.

Fewer queries than keys: the newest tokens of each row over keys that ``inference`` kept, the newest last.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import is_layer_window_attention
from nemorl_tensors.engines.kv_cache import attend_newest
from nemorl_tensors.engines.tree_attention import tree_attention
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from nemorl_megatron.context import ends, in_order

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig

    from nemorl_megatron.packing import Packing


class CoreAttention(MegatronModule):  # type: ignore[misc]
    """Queries, keys and values to context, as megatron-core's layers call it."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        *,
        cap: float | None = None,
        softmax_scale: float | None,
        **_: Any,
    ) -> None:
        """
        Args:
            config: For the head size and which layers have a sliding window.
            layer_number: Counted from 1.
            cap: Scores s become cap * tanh(s / cap).
            softmax_scale: Factor of the scores; ``None``: 1 / sqrt(D).
        """
        super().__init__(config=config)
        self._context_group = parallel_state.get_context_parallel_group()
        self._scale = softmax_scale or 1 / math.sqrt(config.kv_channels)
        self._cap = cap
        windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self._window = config.window_size[0] + 1 if windowed else None

    @property
    def is_full(self) -> bool:
        """Whether tokens see all before them, with scores as they are."""
        return self._window is None and self._cap is None

    @property
    def is_plain(self) -> bool:
        """Whether it is causal attention and no more, as every kernel computes it."""
        plain_scale = math.isclose(self._scale, 1 / math.sqrt(self.config.kv_channels))
        return self.is_full and plain_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        /,
        *,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Packing | None = None,
    ) -> Tensor:
        """[S, B, n, D], [S, B, g, D], [S, B, g, D] -> [S, B, n * D], without B in a packed row.

        While decoding [1, B, n, D], [T, B, g, D], [T, B, g, D] and a mask [B, 1, 1, T] to add to the scores, or none;
        of several new tokens per row [S, B, n, D] and a bool mask [B, 1, S, T] of what each sees.
        """
        assert attention_bias is None, "attention has no bias"
        if packed_seq_params is not None:
            return self._packed(query, key, value, packed_seq_params)
        tokens = query.shape[0]
        if attention_mask is not None and attention_mask.dtype == torch.bool:
            return self._causal(query, key, value, attention_mask)
        if tokens < key.shape[0]:
            return self._newest(query, key, value, attention_mask)
        assert attention_mask is None, "the layout says what attends to what"
        group = self._context_group
        if group.size() == 1:
            return self._causal(query, key, value)
        key, value = in_order(key, group), in_order(value, group)
        seen = ends(tokens, group.rank(), group.size())
        chunks = zip(query.chunk(2), seen, strict=True)
        return torch.cat([self._causal(chunk, key[:end], value[:end]) for chunk, end in chunks])

    def _causal(self, query: Tensor, key: Tensor, value: Tensor, seen: Tensor | None = None) -> Tensor:
        """[S, B, n * D] of queries [S, B, n, D] that are the last of the tokens [T, B, g, D]; of these they see no more
        than ``seen``."""
        tokens, rows = query.shape[:2]
        query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        if self._cap is None:
            context = self._fused(query, key, value, seen)
        else:
            context = self._capped(query, key, value, self._cap, seen)
        return context.permute(2, 0, 1, 3).reshape(tokens, rows, -1)

    def _packed(self, query: Tensor, key: Tensor, value: Tensor, packing: Packing) -> Tensor:
        """[S, n * D] of queries [S, n, D] and keys [S, g, D] of this rank's part of a row."""
        group, tokens = self._context_group, query.shape[0]
        if packing.tree is not None:
            own = [tensor.transpose(0, 1)[None] for tensor in (query, key, value)]
            return tree_attention(packing.tree, own[0], own[1], own[2], self._scale).flatten(1)
        if group.size() == 1 and query.is_cuda and query.dtype is not torch.float32 and self._cap is None:
            return self._by_one_kernel(query, key, value, packing)
        chunks, last = [query], [tokens]
        if group.size() > 1:
            key, value = in_order(key, group), in_order(value, group)
            chunks, last = [*query.chunk(2)], [*ends(tokens, group.rank(), group.size())]
        keys, values = (torch.split(tensor[:, None], [*packing.lengths]) for tensor in (key, value))
        found: list[Tensor] = []
        for chunk, end in zip(chunks, last, strict=True):
            spans = packing.spans(end - len(chunk), end)
            queries = torch.split(chunk[:, None], [span.tokens for span in spans])
            found += [
                self._causal(own, keys[span.sequence][: span.seen], values[span.sequence][: span.seen]).squeeze(1)
                for own, span in zip(queries, spans, strict=True)
            ]
        return torch.cat(found)

    def _by_one_kernel(self, query: Tensor, key: Tensor, value: Tensor, packing: Packing) -> Tensor:
        """The same by flash-attention as PyTorch brings it, without context parallelism."""
        from torch.nn.attention.varlen import varlen_attn  # torch 2.10 and newer

        context = varlen_attn(
            query,
            key,
            value,
            packing.cu_seqlens_q,
            packing.cu_seqlens_kv,
            packing.max_seqlen_q,
            packing.max_seqlen_kv,
            scale=self._scale,
            window_size=(-1 if self._window is None else self._window - 1, 0),
            enable_gqa=query.shape[1] != key.shape[1],
        )
        assert isinstance(context, Tensor), "nothing beside the context was asked for"
        return context.flatten(1)

    def _newest(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """[1, B, n * D] of one token per row."""
        _, rows, heads, size = query.shape
        groups = key.shape[2]
        key, value = key.permute(1, 2, 0, 3), value.permute(1, 2, 0, 3)
        if self._window is not None:
            # The newest tokens stand last, so what a row sees is the end of its columns.
            key, value = key[:, :, -self._window :], value[:, :, -self._window :]
            mask = None if mask is None else mask[..., -self._window :]
        query = query.reshape(rows * groups, heads // groups, size)
        context = attend_newest(query, key, value, mask, self._scale, self._cap)
        return context.reshape(1, rows, heads * size)

    def _fused(self, query: Tensor, key: Tensor, value: Tensor, seen: Tensor | None) -> Tensor:
        """[B, n, S, D] by one kernel."""
        tokens, columns = query.shape[2], key.shape[2]
        mask = seen
        if seen is not None or (self._window is not None and self._window < columns):
            visible = self._visible(tokens, columns, query.device)
            mask = visible if seen is None else visible & seen
        elif tokens < columns:
            mask = causal_lower_right(tokens, columns)
        return scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=mask is None,
            scale=self._scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )

    def _capped(self, query: Tensor, key: Tensor, value: Tensor, cap: float, seen: Tensor | None) -> Tensor:
        """[B, n, S, D]; scores of all pairs exist, in float32 for the softmax."""
        share = query.shape[1] // key.shape[1]
        key, value = (tensor.repeat_interleave(share, 1) for tensor in (key, value))
        scores = query @ key.transpose(2, 3) * self._scale
        scores = cap * torch.tanh(scores / cap)
        visible = self._visible(query.shape[2], key.shape[2], query.device)
        scores = scores.masked_fill(~(visible if seen is None else visible & seen), float("-inf"))
        return torch.softmax(scores, -1, dtype=torch.float32).to(query.dtype) @ value

    def _visible(self, tokens: int, seen: int, device: torch.device) -> Tensor:
        """[S, T] bool: whether the row's token, one of the last S of T, sees the column's."""
        place = torch.arange(seen, device=device)
        distance = place[seen - tokens :, None] - place[None, :]
        visible = distance >= 0
        return visible if self._window is None else visible & (distance < self._window)
