"""Microbatches through a model that is divided in any way, by megatron-core's schedules.

# N = tokens of all sequences concatenated, M = scored tokens, R = rows, W = row width, S = W, H = hidden size

megatron-core runs forward and backward passes in the order that keeps all pipeline stages busy and calls back on ranks
of the last one. What is found there is known on the last stage only; ``Parallel.from_last_stage`` hands it back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from nemorl_tensors import TokenBatch
from nemorl_tensors.engines.layouts import Layout
from nemorl_tensors.engines.rows import PAD_ID, Rows, fed_lengths, plan_microbatches
from torch import Tensor
from torch.nn.functional import pad

from nemorl_megatron.context import own_part
from nemorl_megatron.head import AnyHead
from nemorl_megatron.mtp import Ahead
from nemorl_megatron.packing import Packing

if TYPE_CHECKING:
    from nemorl_megatron.mtp_config import MtpConfig
    from nemorl_megatron.parallel import Parallel

SLACKS = (0.0, 1 / 64, 1 / 32, 1 / 16, 1 / 8)
"""Room in rows of one width beyond an equal share of the tokens, tried in this order: sequences are not cut."""

LastStage = Callable[[Tensor, "Microbatch"], tuple[Tensor, Any]]
"""(hidden states [S, R, H] of all tokens, those of MTP's depths after them, what they are of) -> a loss to start the
backward pass from, and a result"""


@dataclass(frozen=True)
class Microbatch:
    """The input of one forward pass."""

    batch: TokenBatch
    rows: Rows
    """This rank's part of them; a row of padding where there is nothing to score, as every rank takes part in every
    pass"""
    packing: Packing | None = None
    """Of a row that holds many sequences."""
    visits: Tensor | None = None
    """That of ``routers``, where mixtures count or replay."""
    ahead: Ahead | None = None
    """How MTP layers predict further tokens, where they do"""

    def predicting(self, states: Tensor) -> Tensor:
        """[M, H] the states that predict the scored tokens, of [S, R, H] or more after those."""
        width = self.rows.input_ids.shape[1]
        return states[self.rows.predictors % width, self.rows.predictors // width]


def microbatches(
    batch: TokenBatch,
    budget: int,
    parallel: Parallel,
    layout: Layout,
    *,
    dtype: torch.dtype = torch.float32,
    candidates: bool = False,
    mtp: MtpConfig | None = None,
) -> Sequence[Microbatch]:
    """A batch cut into forward passes, on this rank's device. Collective where experts are divided.

    Args:
        batch: This rank's shard; the ranks of one copy of the model have the same.
        budget: Computed tokens of one pass.
        parallel: This rank's place.
        layout: How sequences become rows.
        dtype: Of the computation.
        candidates: Score ``candidate_ids`` [N, K] in place of the tokens.
        mtp: Have MTP layers predict further tokens.
    """
    sizes, device = parallel.sizes, parallel.device
    multiple = (sizes.tensor if sizes.sequence_parallel else 1) * (2 * sizes.context if sizes.context > 1 else 1)
    same_shape = sizes.virtual_pipeline is not None
    if not same_shape:
        plan = layout.plan(batch, budget)
    elif layout.is_packed:
        plan = _plan_even(batch, budget, sizes.pipeline)
    else:
        plan = _plan_equal(batch, budget)
    parts = [batch.select(sequences) for sequences in plan]
    # The number of passes is that of the rank with the most where ranks exchange tokens, and a multiple of the number
    # of stages where these have parts. One pass at least: gradients are added up after the last.
    count = parallel.largest(max(1, len(parts))) if sizes.expert > 1 else max(1, len(parts))
    if same_shape:
        count = -(-count // sizes.pipeline) * sizes.pipeline
    parts += [batch.select([])] * (count - len(parts))
    rows = [layout.rows(part, width_multiple=multiple, candidates=candidates) for part in parts]
    height, width = 1, multiple
    if same_shape:
        height = max(1, *(found.input_ids.shape[0] for found in rows))
        width = max(multiple, *(found.input_ids.shape[1] for found in rows))
    rows = [_at_least(found, height, width) for found in rows]
    packings = [_packing(found, dtype) for found in rows]
    own = partial(_own, parallel)
    ahead = [None if mtp is None else Ahead.of(mtp, found, own) for found in rows]
    # All is laid out on the host, and sent to the device at once.
    return [
        Microbatch(
            part.to(device),
            found.to(device),
            packing and packing.to(device),
            ahead=further and further.to(device),
        )
        for part, found, packing, further in zip(parts, map(own, rows), packings, ahead, strict=True)
    ]


def _own(parallel: Parallel, rows: Rows) -> Rows:
    """This rank's part of rows."""
    sizes = parallel.sizes
    return own_part(rows, parallel.place.context, sizes.context) if sizes.context > 1 else rows


def _packing(rows: Rows, dtype: torch.dtype) -> Packing | None:
    """The layers' argument for a row that holds many sequences."""
    if rows.tree is not None:
        return Packing.of_tree(rows.tree, dtype)
    return None if rows.position_ids is None else Packing.of(rows.position_ids)


def _plan_equal(batch: TokenBatch, budget: int) -> list[list[int]]:
    """Sequence indices per microbatch, as many in each as the budget allows of the longest."""
    longest = max(1, int(fed_lengths(batch).max())) if len(batch) else 1
    groups = max(1, budget // (longest * batch.sequences_per_group))
    step = groups * batch.sequences_per_group
    return [list(range(start, min(start + step, len(batch)))) for start in range(0, len(batch), step)]


def _plan_even(batch: TokenBatch, budget: int, stages: int) -> list[list[int]]:
    """Sequence indices per microbatch for packed rows of one width: as many as stages ask for, filled alike."""
    fed_G = fed_lengths(batch).view(-1, batch.sequences_per_group).sum(1)
    budget = max(budget, int(fed_G.max()) if len(fed_G) else 0)
    plan = plan_microbatches(batch, budget, padded=False)
    count = -(-len(plan) // stages) * stages
    for slack in SLACKS:
        width = math.ceil(int(fed_G.sum()) / count * (1 + slack))
        even = plan_microbatches(batch, max(width, int(fed_G.max())), padded=False)
        if len(even) <= count:
            return even
    return plan


def _at_least(rows: Rows, height: int, width: int) -> Rows:
    """Rows padded below and on the right to at least this shape; where there are none they get it.

    What pads the row of a packed layout is a sequence of its own.
    """
    found_height, found_width = rows.input_ids.shape
    missing = (max(0, height - found_height), max(0, width - found_width))
    input_ids = pad(rows.input_ids, (0, missing[1], 0, missing[0]), value=PAD_ID)
    position_ids = rows.position_ids
    if position_ids is not None:
        padding = torch.arange(missing[1], device=position_ids.device).expand(len(position_ids), missing[1])
        position_ids = torch.cat((position_ids, padding), 1)
    predictors, places = (
        found // max(1, found_width) * input_ids.shape[1] + found % max(1, found_width)
        for found in (rows.predictors, rows.places)
    )
    return replace(rows, input_ids=input_ids, position_ids=position_ids, predictors=predictors, places=places)


def run(
    pieces: Sequence[torch.nn.Module],
    parts: Sequence[Microbatch],
    head: AnyHead | None,
    on_last_stage: LastStage,
    parallel: Parallel,
    *,
    backward: bool,
) -> list[Any]:
    """Forward passes over all microbatches, and backward passes. Collective.

    Args:
        pieces: This rank's part of the model: it computes hidden states of token ids.
        parts: As many on every rank of a copy of the model.
        head: Of the model, on ranks of the last stage.
        on_last_stage: Makes a loss and a result of each microbatch. Losses add up; nothing divides them.
        parallel: This rank's place.
        backward: Compute gradients, and add them up over data-parallel ranks at the end.

    Returns:
        The results, on ranks of the last stage; elsewhere nothing.
    """

    def finish(part: Microbatch, states: Tensor) -> tuple[Tensor, Tensor, Any]:
        assert head is not None, "the last stage has the output head"
        if part.ahead is None:
            whole = head.whole(states)
        else:  # each depth has the parts of all ranks by itself
            whole = torch.cat([head.whole(depth) for depth in states.chunk(1 + len(part.ahead.rows))])
        loss, result = on_last_stage(whole, part)
        # The number stands for tokens that megatron-core would divide by, and does not (`calculate_per_token_loss`).
        return loss, torch.zeros((), dtype=torch.int, device=loss.device), result

    def forward(source: Iterator[Microbatch], piece: torch.nn.Module) -> tuple[Tensor, Any]:
        part = next(source)
        told = {"visits": part.visits, "ahead": part.ahead}
        told = {name: value for name, value in told.items() if value is not None}
        states = piece(part.rows.input_ids, part.rows.position_ids, part.packing, **told)
        return states, lambda states: finish(part, states)

    # Parts of a stage are visited independently: each reads the microbatches by itself.
    sources = [iter(parts) for _ in pieces]
    height, width = parts[0].rows.input_ids.shape
    with nullcontext() if backward else torch.no_grad():
        found: list[Any] = get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=sources if len(pieces) > 1 else sources[0],
            model=[*pieces] if len(pieces) > 1 else pieces[0],
            num_microbatches=len(parts),
            seq_length=width * parallel.sizes.context,
            micro_batch_size=height,
            forward_only=not backward,
        )
    return found
