"""Attention within a row that holds the prefix forest of several sequences: the kernel of the shared layout.

# W = row width, S = sequences, H = heads, E = head size, Q and K = queries and keys of a bucket, padded

Each sequence's own tokens, which none before it has, attend to the whole sequence. So a layer's attention is one
problem per sequence: its last ``new`` tokens as queries, all its tokens as keys. Problems of similar size form a
bucket, which is one call of an attention function: causal where nothing is shared, else with a mask. Where a kernel
asks for it, keys that all sequences of a bucket see whole, such as a prompt's, are gathered once and need no mask.
Forward and backward are those of attention over the sequences alone; keys and values that several sequences gather
receive the sum of their gradients.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from nemorl_tensors.devices import moved, on_device
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
    real: Tensor
    """[S, Q] bool: which queries are not padding"""
    common_slots: Tensor | None
    """[C] where keys stand that every query sees before these; ``None``: there are none"""

    def to(self, device: torch.device | str) -> Bucket:
        """This one on another device."""
        return on_device(self, device)


@dataclass(frozen=True)
class TreePlan:
    """A tree made ready for attention: the same for all layers."""

    buckets: tuple[Bucket, ...]
    query_slots: Tensor
    """[sum of S * Q] where the queries stand in the row, bucket by bucket; any slot where padded"""
    places: Tensor
    """[W] where the answer for each slot stands among those of the queries"""

    @classmethod
    def of(cls, tree: Tree, dtype: torch.dtype, *, min_common_scores: int | None = None) -> TreePlan:
        """The plan of a tree.

        Args:
            tree: Where the tokens stand.
            dtype: Precision of the model, and of masks.
            min_common_scores: From so many scores of a head on, keys that a bucket has in common are taken apart.
                Unset: never.
        """
        places = torch.zeros(sum(tree.new), dtype=torch.int64, device=tree.slots.device)
        buckets, query_slots, done = [], [], 0
        for members, common in _divided(tree, min_common_scores):
            first = torch.tensor([tree.lengths[i] - tree.new[i] for i in members], device=tree.slots.device)[:, None]
            slots, is_query = _queries(tree, members, first)
            places[slots[is_query]] = torch.nonzero(is_query.flatten()).squeeze(1) + done
            query_slots.append(slots.flatten())
            done += slots.numel()
            buckets.append(_bucket(tree, members, common, first, is_query, dtype))
        return cls(tuple(buckets), torch.cat(query_slots), places)

    def to(self, device: torch.device | str) -> TreePlan:
        """This plan on another device."""
        buckets = tuple(bucket.to(device) for bucket in self.buckets)
        return TreePlan(buckets, moved(self.query_slots, device), moved(self.places, device))


def _queries(tree: Tree, members: Sequence[int], first: Tensor) -> tuple[Tensor, Tensor]:
    """[S, Q] slots of the own tokens of these sequences, whose first ones are at ``first`` [S, 1], and which count."""
    slots, device = tree.slots, tree.slots.device
    new = torch.tensor([tree.new[i] for i in members], device=device)[:, None]
    steps = torch.arange(int(new.max()), device=device)
    places = (first + steps).clamp(max=slots.shape[1] - 1)
    return slots[torch.tensor(members, device=device)].gather(1, places), steps < new


def _bucket(tree: Tree, members: Sequence[int], common: int, first: Tensor, real: Tensor, dtype: torch.dtype) -> Bucket:
    queries = real.shape[1]
    rows, keys = torch.tensor(members, device=tree.slots.device), max(tree.lengths[i] for i in members)
    different = first - common
    different = different if len(set(different.flatten().tolist())) > 1 else different[:1]
    return Bucket(
        len(members),
        queries,
        keys - common,
        tree.slots[rows, common:keys].flatten(),
        _mask(different, queries, keys - common, dtype) if int(first.max()) else None,
        real,
        tree.slots[rows[0], :common] if common else None,
    )


def _divided(tree: Tree, min_common_scores: int | None) -> Iterator[tuple[list[int], int]]:
    """Buckets, and how many first keys all their sequences have in common, where those are many enough; else 0."""
    for bucket in bucketed(tree.lengths, tree.new):
        clusters: dict[int, list[int]] = defaultdict(list)
        for index in bucket if min_common_scores is not None else ():
            clusters[int(tree.slots[index, 0])].append(index)
        rest = set(bucket)
        for members in clusters.values():
            common = _common_keys(tree, members)
            if len(members) * max(tree.new[i] for i in members) * common >= max(min_common_scores or 0, 1):
                rest -= set(members)
                yield members, common
        if rest:
            yield [index for index in bucket if index in rest], 0


def _common_keys(tree: Tree, members: Sequence[int]) -> int:
    """How many tokens before their own these sequences all begin with."""
    shared = min(tree.lengths[i] - tree.new[i] for i in members)
    slots = tree.slots[torch.tensor(members, device=tree.slots.device), :shared]
    return int((slots == slots[:1]).all(0).cumprod(0).sum())


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
CommonAttention = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, float | None], Tensor]
"""The same with common keys and values [G, C, E], which every query sees, before its own; after the mask [S, Q] bool:
which queries are real"""


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
    common_attention: CommonAttention | None = None,
) -> Tensor:
    """[W, H, E] from [1, H or G, W, E]: one call of ``attention`` per bucket.

    Buckets with common keys, which a plan has when it was asked for them, go to ``common_attention``.
    """
    query, key, value = (states[0].transpose(0, 1) for states in (query, key, value))
    queries: Tensor = _Dealt.apply(query, plan.query_slots, plan.places)  # type: ignore[no-untyped-call]
    answers = []
    sizes = [bucket.sequences * bucket.queries for bucket in plan.buckets]
    for bucket, part in zip(plan.buckets, torch.split(queries, sizes), strict=True):
        q = _by_sequence(part, bucket.sequences)
        k, v = (_by_sequence(states.index_select(0, bucket.key_slots), bucket.sequences) for states in (key, value))
        if bucket.common_slots is None:
            answer = attention(q, k, v, bucket.mask, scaling)
        else:
            assert common_attention is not None, "the plan was asked for common keys"
            assert bucket.mask is not None, "sequences that share tokens have a mask"
            common_k, common_v = (
                states.index_select(0, bucket.common_slots).transpose(0, 1) for states in (key, value)
            )
            answer = common_attention(q, common_k, common_v, k, v, bucket.mask, bucket.real, scaling)
        answers.append(answer.flatten(0, 1))
    collected: Tensor = _Collected.apply(torch.cat(answers), plan.places)  # type: ignore[no-untyped-call]
    return collected


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
