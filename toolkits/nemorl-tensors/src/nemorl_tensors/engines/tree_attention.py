"""Attention within a row that holds the prefix forest of several sequences: the kernel of the shared layout.

# W = row width, S = sequences, H = heads, E = head size, Q and K = queries and keys of a bucket, padded

Each sequence's own tokens, which none before it has, attend to the whole sequence. So a layer's attention is one
problem per sequence: its last ``new`` tokens as queries, all its tokens as keys. Problems of similar size form a
bucket, which is one call of an attention function: causal where nothing is shared, else with a mask.
Forward and backward are those of attention over the sequences alone; keys and values that several sequences gather
receive the sum of their gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from nemorl_tensors.engines.rows import Tree

MAX_WASTE = 1.5
"""Scores that a bucket computes per score that is needed, at most."""
SMALL_BUCKET = 8_192
"""Scores below which the waste of a bucket costs less than another call."""


@dataclass(frozen=True)
class Bucket:
    """Problems of similar size."""

    sequences: int
    queries: int
    keys: int
    key_slots: Tensor
    """[S * K] where the keys stand in the row; any slot past a sequence's end, where the mask is False"""
    mask: Tensor | None
    """[S or 1, 1, Q, K] added to the scores; ``None``: causal, each sequence's tokens being all its own"""


@dataclass(frozen=True)
class TreePlan:
    """A tree made ready for attention: the same for all layers."""

    buckets: tuple[Bucket, ...]
    query_slots: Tensor
    """[sum of S * Q] where the queries stand in the row, bucket by bucket; any slot where padded"""
    places: Tensor
    """[W] where the answer for each slot stands among those of the queries"""

    @classmethod
    def of(cls, tree: Tree, dtype: torch.dtype) -> TreePlan:
        """The plan of a tree, masks in the precision of the model."""
        slots, device = tree.slots, tree.slots.device
        places = torch.zeros(sum(tree.new), dtype=torch.int64, device=device)
        buckets, query_slots, done = [], [], 0
        for members in bucketed(tree.lengths, tree.new):
            shared = [tree.lengths[i] - tree.new[i] for i in members]
            queries, keys = max(tree.new[i] for i in members), max(tree.lengths[i] for i in members)
            rows = torch.tensor(members, device=device)
            first = torch.tensor(shared, device=device)[:, None]
            new = torch.tensor([tree.new[i] for i in members], device=device)[:, None]
            steps = torch.arange(queries, device=device)
            bucket_slots = slots[rows].gather(1, (first + steps).clamp(max=slots.shape[1] - 1))
            is_query = steps < new
            places[bucket_slots[is_query]] = torch.nonzero(is_query.flatten()).squeeze(1) + done
            query_slots.append(bucket_slots.flatten())
            done += bucket_slots.numel()
            mask = None
            if any(shared):
                different = first if len(set(shared)) > 1 else first[:1]
                mask = _mask(different, queries, keys, dtype)
            buckets.append(Bucket(len(members), queries, keys, slots[rows, :keys].flatten(), mask))
        return cls(tuple(buckets), torch.cat(query_slots), places)


def bucketed(lengths: Sequence[int], new: Sequence[int]) -> list[list[int]]:
    """Indices of the problems (``new`` queries, ``lengths`` keys) in buckets of little waste; without queries: none.

    Those without a shared token are apart: they need no mask.
    """
    found: list[list[int]] = []
    for is_whole in (True, False):
        chosen = [i for i in range(len(new)) if new[i] and (new[i] == lengths[i]) == is_whole]
        needed = widest = 0
        bucket: list[int] = []
        for index in sorted(chosen, key=lambda i: (lengths[i], new[i]), reverse=True):
            total = needed + new[index] * lengths[index]
            widest = max(widest, new[index])
            scores = (len(bucket) + 1) * widest * lengths[bucket[0] if bucket else index]
            if bucket and scores > max(MAX_WASTE * total, SMALL_BUCKET):
                found.append(bucket)
                bucket, total, widest = [], new[index] * lengths[index], new[index]
            bucket.append(index)
            needed = total
        if bucket:
            found.append(bucket)
    return found


def _mask(first: Tensor, queries: int, keys: int, dtype: torch.dtype) -> Tensor:
    """Query i of a sequence sees the ``first`` keys, which it shares, and the i + 1 after them."""
    last_seen = first + torch.arange(queries, device=first.device)
    seen = torch.arange(keys, device=first.device) <= last_seen[..., None]
    return torch.zeros(seen.shape, dtype=dtype, device=first.device).masked_fill_(~seen, -torch.inf)[:, None]


Attention = Callable[[Tensor, Tensor, Tensor, Tensor | None, float | None], Tensor]
"""[S, H, Q, E] queries, [S, G, K, E] keys and values, a mask or ``None`` (causal), the scale -> [S, Q, H, E]"""


def torch_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    """:data:`Attention` by torch's own kernels, on any device."""
    found = scaled_dot_product_attention(
        query, key, value, mask, is_causal=mask is None, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
    )
    return found.transpose(1, 2)


def tree_attention(
    plan: TreePlan,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float | None,
    attention: Attention = torch_attention,
) -> Tensor:
    """[W, H, E] from [1, H or G, W, E]: one call of ``attention`` per bucket."""
    query, key, value = (states[0].transpose(0, 1) for states in (query, key, value))
    queries: Tensor = _Dealt.apply(query, plan.query_slots, plan.places)  # type: ignore[no-untyped-call]
    answers = []
    sizes = [bucket.sequences * bucket.queries for bucket in plan.buckets]
    for bucket, part in zip(plan.buckets, torch.split(queries, sizes), strict=True):
        q = _by_sequence(part, bucket.sequences)
        k, v = (_by_sequence(states.index_select(0, bucket.key_slots), bucket.sequences) for states in (key, value))
        answers.append(attention(q, k, v, bucket.mask, scaling).flatten(0, 1))
    answer: Tensor = _Collected.apply(torch.cat(answers), plan.places)  # type: ignore[no-untyped-call]
    return answer


class _Dealt(torch.autograd.Function):
    """States of the row to the buckets. Of what is padded the gradient is zero, so it gathers, too."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, slots: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        return states.index_select(0, slots)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (places,) = ctx.saved_tensors
        return grads[0].index_select(0, places), None, None


class _Collected(torch.autograd.Function):
    """Answers of the buckets back to the row."""

    @staticmethod
    def forward(ctx: Any, answers: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        ctx.answers = answers.shape[0]
        return answers.index_select(0, places)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (places,) = ctx.saved_tensors
        spread = grads[0].new_zeros((ctx.answers, *grads[0].shape[1:]))
        return spread.index_copy_(0, places, grads[0]), None


def _by_sequence(states: Tensor, sequences: int) -> Tensor:
    """[S * X, H, E] -> [S, H, X, E]"""
    return states.view(sequences, -1, *states.shape[1:]).transpose(1, 2)
