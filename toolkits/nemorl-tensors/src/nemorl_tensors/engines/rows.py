"""From ragged sequences to the rows that a model computes, and back to the positions that are scored.

What training backends share of laying out a batch; how a model computes rows is theirs.

# N = tokens of all sequences concatenated, B = sequences, M = scored tokens, R = rows, W = row width

A model is fed only what scoring needs: of each sequence the tokens before its last scored one, and nothing of a
sequence without any. Three layouts, same numbers:

- padded: one row per sequence, padded on the right. Causal attention cannot see what stands to the right, so real
  tokens need no attention mask, and attention kernels keep their fast causal path.
- packed: one row holds all sequences, ``position_ids`` restart at each. Attention between sequences is cut by
  transformers, which recognises the restarts.
- shared (``tree_rows``): one row holds the prefix forest of the sequences, tokens that they have in common once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy
import torch
from nemorl.media import Media
from torch import Tensor

from nemorl_tensors.batch import NO_ROUTE, ROUTES, TokenBatch
from nemorl_tensors.devices import on_device
from nemorl_tensors.functional import segment_ids
from nemorl_tensors.logprobs import next_token_targets

PAD_ID = 0
"""Any valid token id: padding is never attended to by real tokens and never scored."""

CPU_MICROBATCH_TOKENS = 1536
CUDA_MICROBATCH_TOKENS = 16384
"""Padded tokens per forward/backward by default. CPU: the activations of one layer should stay in cache (README)."""

MICROBATCH_COST_TOKENS = 700
"""Fixed cost of a microbatch, in tokens (measured on a model of 0.8 M parameters)."""


@dataclass(frozen=True)
class Tree:
    """How the tokens of a row belong to sequences that share them. S = different sequences, L = longest one.

    Sequences are in an order in which the tokens that one has in common with those before it are its first ones.
    """

    slots: Tensor
    """[S, L] int64: where each token of a sequence stands in the row; 0 past its end"""
    lengths: tuple[int, ...]
    """[S] tokens of each sequence"""
    new: tuple[int, ...]
    """[S] its last tokens, which no sequence before it has; they stand one after the other. They add up to the row"""


@dataclass(frozen=True)
class Rows:
    """One microbatch as model input."""

    input_ids: Tensor
    """[R, W] int64"""
    position_ids: Tensor | None
    """[R, W] int64 when packed; ``None``: 0 … W-1 in each row"""
    predictors: Tensor
    """[M] index into the flattened [R * W] positions: where the state stands that predicts each scored token"""
    targets: Tensor
    """[M] index into the microbatch's [N] tokens: the scored tokens"""
    target_ids: Tensor
    """[M] their token ids, or [M, K] candidates for their places"""
    tree: Tree | None = None
    """Which sequences share which tokens, where any do: what attends to what"""
    real_tokens: int = 0
    """Positions that hold a token of a sequence; the others are padding"""
    media: Mapping[int, Media] = field(default_factory=dict)
    """The images and sounds in ``input_ids``, by name"""
    places: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    """[P] index into the flattened positions, of each token of each sequence: one that k sequences have in common
    stands here k times, padding not at all"""
    owners: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    """[P] the sequence, an index into the microbatch's [B]"""
    routes: Tensor | None = None
    """[R * W, L, K] int16: the experts of each position in each layer of experts, ``NO_ROUTE`` where none is known"""

    def to(self, device: torch.device | str) -> Rows:
        """These rows on another device. A tree stays on the host, where attention over it is planned."""
        return on_device(self, device)


def slotted_routes(batch: TokenBatch, slots: Tensor, tokens: Tensor, positions: int) -> Tensor | None:
    """``Rows.routes`` of as many positions, where ``slots`` are those of ``tokens`` of the batch."""
    if ROUTES not in batch:
        return None
    recorded = batch[ROUTES]
    routes = recorded.new_full((positions, *recorded.shape[1:]), NO_ROUTE)
    routes[slots] = recorded[tokens]
    return routes


def plan_microbatches(batch: TokenBatch, budget: int, *, padded: bool = True) -> list[list[int]]:
    """Sequence indices per microbatch: of similar length together, up to ``budget`` computed tokens.

    A sequence longer than the budget has a microbatch to itself. Every sequence is in exactly one microbatch, together
    with those it is compared with; those without a scored token, which cost nothing, are in the last.
    """
    sequences_per_group = batch.sequences_per_group
    fed_GK = fed_lengths(batch).view(-1, sequences_per_group)
    costs: list[int] = (fed_GK.amax(1) * sequences_per_group if padded else fed_GK.sum(1)).tolist()
    order = sorted(range(len(costs)), key=costs.__getitem__, reverse=True)
    fed = [group for group in order if costs[group] > 0]
    widths = [costs[group] for group in fed]
    places = _padded_bins(widths, budget) if padded else first_fit_decreasing(widths, budget)
    groups = [[fed[place] for place in members] for members in places] or [[]]
    groups[-1] += order[len(fed) :]
    return [
        [group * sequences_per_group + i for group in members for i in range(sequences_per_group)]
        for members in groups
        if members
    ]


def _padded_bins(widths: list[int], budget: int) -> list[list[int]]:
    """Indices per microbatch that minimise the computed tokens plus ``MICROBATCH_COST_TOKENS`` each.

    ``widths`` are those of a group's rows together. They descend, so a microbatch of groups i … j-1 computes
    ``widths[i] * (j - i)``, and the best cut of the first j follows from the best cuts of fewer. No other plan computes
    less: if the microbatch with the widest row takes the widest rows, as many as it had, no other one's widest grows.
    First fit decreasing, which packed rows get, would fill each up to the budget: of 128 rows of log-normal length and
    4,096 tokens, 1.30 times the real tokens where this computes 1.20.
    """
    best = [0.0] + [float("inf")] * len(widths)
    first = [0] * (len(widths) + 1)
    for end in range(1, len(widths) + 1):
        for start in range(end - 1, -1, -1):
            computed = widths[start] * (end - start)
            if computed > budget and end - start > 1:
                break
            cost = best[start] + computed + MICROBATCH_COST_TOKENS
            if cost < best[end]:
                best[end], first[end] = cost, start
    bins: list[list[int]] = []
    end = len(widths)
    while end > 0:
        bins.append(list(range(first[end], end)))
        end = first[end]
    return bins[::-1]


def first_fit_decreasing(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Indices of ``lengths``, which descend, per bin: each goes to the first bin that has room for it.

    At most 11/9 of the fewest possible bins and 6/9 of one (Johnson 1973; Dosa 2007). What exceeds the budget has a
    bin to itself.
    """
    bins: list[list[int]] = []
    room = numpy.empty(len(lengths), dtype=numpy.int64)
    for index, length in enumerate(lengths):
        fits = room[: len(bins)] >= length
        place = int(fits.argmax()) if fits.any() else len(bins)
        if place == len(bins):
            bins.append([])
            room[place] = budget
        bins[place].append(index)
        room[place] -= length
    return bins


def fed_lengths(batch: TokenBatch) -> Tensor:
    """[B] tokens of each sequence that the model must see: up to, not including, the last scored one; 0 if none is."""
    targets = next_token_targets(batch.mask, batch.lengths)
    starts = torch.cumsum(batch.lengths, 0) - batch.lengths
    sequences = batch.sequence_ids[targets]
    fed = torch.zeros_like(batch.lengths)
    return fed.scatter_reduce(0, sequences, targets - starts[sequences], "amax")


def to_rows(batch: TokenBatch, *, packed: bool, width_multiple: int = 1, candidates: bool = False) -> Rows:
    """The microbatch laid out for the model, rows padded to a multiple of ``width_multiple``.

    With ``candidates``, what is scored at each place is the field ``candidate_ids`` [N, K] instead of the token.
    """
    lengths, fed = batch.lengths, fed_lengths(batch)
    starts = torch.cumsum(lengths, 0) - lengths
    sequences = segment_ids(lengths)
    positions = torch.arange(batch.num_tokens, device=lengths.device) - starts[sequences]
    if packed:
        row_starts = torch.cumsum(fed, 0) - fed
        shape = (1, -(-int(fed.sum()) // width_multiple) * width_multiple)
    else:
        present = fed > 0
        width = int(fed.max()) if fed.numel() else 0
        width = -(-width // width_multiple) * width_multiple
        row_starts = (torch.cumsum(present, 0) - 1) * width
        shape = (int(present.sum()), width)

    seen = torch.nonzero(positions < fed[sequences]).squeeze(1)
    slots = row_starts[sequences[seen]] + positions[seen]
    input_ids = torch.full((shape[0] * shape[1],), PAD_ID, dtype=torch.int64, device=lengths.device)
    input_ids[slots] = batch.token_ids[seen]
    position_ids: Tensor | None = None
    if packed:
        # What pads the row is a sequence of its own, whose positions start at 0 too.
        position_ids = torch.arange(shape[1], device=lengths.device) - slots.numel()
        position_ids[slots] = positions[seen]
    targets = next_token_targets(batch.mask, lengths)
    return Rows(
        input_ids=input_ids.view(shape),
        position_ids=None if position_ids is None else position_ids.view(shape),
        predictors=row_starts[sequences[targets]] + positions[targets] - 1,
        targets=targets,
        target_ids=(batch["candidate_ids"] if candidates else batch.token_ids)[targets],
        real_tokens=seen.numel(),
        media=batch.media,
        places=slots,
        owners=sequences[seen],
        routes=slotted_routes(batch, slots, seen, input_ids.numel()),
    )


def default_microbatch_tokens(device: str) -> int:
    """The budget when the config names none."""
    return CPU_MICROBATCH_TOKENS if device == "cpu" else CUDA_MICROBATCH_TOKENS
