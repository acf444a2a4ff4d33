"""Whether sequences share rows: what is asked for, and a check that the model as it was built computes the same.

# M = scored tokens, N = tokens of all sequences, S = tokens of a row, R = rows, H = hidden size

Each piece of the model is checked by itself, on every rank and without the pipeline: a stage that fails would leave the
others waiting for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from nemorl.errors import BackendError
from nemorl_tensors import TokenBatch
from torch import Tensor

from nemorl_megatron.attention import CoreAttention
from nemorl_megatron.pipeline import Microbatch, microbatches

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel

    from nemorl_megatron.config import LayoutName
    from nemorl_megatron.parallel import Parallel

PROBE_LENGTHS = (6, 13, 2, 9)
PROBE_BUDGET = 1024
PROBE_VOCABULARY = 64
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.05}
"""Of the norm of the states. Sequences that see each other are off by 0.3 in a random tiny model."""


@dataclass(frozen=True)
class Layout:
    """How a batch becomes rows."""

    is_packed: bool
    reason: str | None = None
    """Why rows are padded although nobody asked for that."""


def choose(asked: LayoutName, pieces: Sequence[GPTModel], parallel: Parallel, vocabulary: int) -> Layout:
    """The layout of a model whose weights are there. Collective.

    Args:
        asked: In the config.
        pieces: This rank's.
        parallel: This rank's place.
        vocabulary: Token ids are below this.

    Raises:
        BackendError: packed rows were asked for, and this model cannot compute them.
    """
    if asked == "padded":
        return Layout(is_packed=False)
    reason = _kernel_problem(pieces, parallel) or _difference(pieces, parallel, vocabulary)
    if not parallel.largest(reason is not None):
        return Layout(is_packed=True)
    reason = reason or "another rank's part of the model does not compute them"
    if asked == "packed":
        raise BackendError(f"sequences cannot share rows: {reason}", fix="set policy.backend.layout: padded")
    return Layout(is_packed=False, reason=reason)


def _kernel_problem(pieces: Sequence[GPTModel], parallel: Parallel) -> str | None:
    kernels = {type(layer.self_attention.core_attention) for piece in pieces for layer in piece.decoder.layers}
    if parallel.sizes.context > 1 and not kernels <= {CoreAttention}:
        return "Transformer Engine's attention divides sequences over context-parallel ranks, and here rows are divided"
    return None


@torch.no_grad()
def _difference(pieces: Sequence[GPTModel], parallel: Parallel, vocabulary: int) -> str | None:
    """By how much states of sequences in one row differ from those in rows of their own, if by too much."""
    draw = torch.Generator().manual_seed(0)
    known = min(vocabulary, PROBE_VOCABULARY)
    ids = [torch.randint(known, (length,), generator=draw).tolist() for length in PROBE_LENGTHS]
    batch = TokenBatch.from_sequences(ids, [[True] * len(sequence) for sequence in ids])
    # As if stages had no parts, which would ask for several microbatches.
    whole = replace(parallel, sizes=replace(parallel.sizes, virtual_pipeline=None))
    (alone,), (together,) = (microbatches(batch, PROBE_BUDGET, whole, packed=packed) for packed in (False, True))
    differences: list[Tensor] = []
    for piece in pieces:
        expected = _states(piece, alone, parallel)
        try:
            found = _states(piece, together, parallel)
        except Exception as error:  # a kernel that does not serve such rows raises what it likes
            return f"{type(error).__name__}: {error}"
        differences.append((found - expected).norm() / expected.norm())
    worst = float(torch.stack(differences).amax())
    if worst <= TOLERANCE[pieces[0].config.params_dtype]:
        return None
    return f"states of sequences in one row differ from theirs alone by {worst:.2g} of their norm"


def _states(piece: GPTModel, part: Microbatch, parallel: Parallel) -> Tensor:
    """[N, H] float32: what a piece makes of the tokens that predict others, at the places of those; 0 elsewhere."""
    rows, sizes = part.rows, parallel.sizes
    if not piece.pre_process:
        draw = torch.Generator().manual_seed(1)
        table = torch.randn(PROBE_VOCABULARY, piece.config.hidden_size, generator=draw)
        given = table.to(parallel.device, piece.config.params_dtype)[rows.input_ids.t()]
        piece.set_input_tensor(given.chunk(sizes.tensor)[parallel.place.tensor] if sizes.sequence_parallel else given)
    states: Tensor = piece(rows.input_ids, rows.position_ids, part.packing)
    if sizes.sequence_parallel:
        states = gather_from_sequence_parallel_region(states)
    places = states.new_zeros((part.batch.num_tokens, states.shape[-1]), dtype=torch.float32)
    places[rows.targets] = part.predicting(states).float()
    if sizes.context > 1:
        dist.all_reduce(places, group=parallel.context_group)
    return places
