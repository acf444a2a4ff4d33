"""How sequences become rows: what is asked for, and checks that the model as it was built computes the same so.

# N = tokens of all sequences, S = tokens of a row, R = rows, H = hidden size

Each piece of the model is checked by itself, on every rank and without the pipeline: a stage that fails would leave the
others waiting for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from nemorl.errors import BackendError
from nemorl_tensors import TokenBatch
from nemorl_tensors.engines.layouts import EACH_FOR_ITSELF, Layout, probe_batch
from nemorl_tensors.engines.prefix_forest import MIN_RATIO
from nemorl_tensors.engines.steps import PLACE, with_places
from torch import Tensor

from nemorl_megatron.attention import CoreAttention
from nemorl_megatron.pipeline import Microbatch, microbatches

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel

    from nemorl_megatron.config import LayoutName
    from nemorl_megatron.parallel import Parallel


PADDED = Layout(packed=False, min_ratio=None)
PACKED = Layout(packed=True, min_ratio=None)
SHARED = Layout(packed=True, min_ratio=1.0)
PROBE_BUDGET = 1024
PROBE_VOCABULARY = 100
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.05}
"""Of the norm of the states. Sequences that see each other are off by 0.3 in a random tiny model."""


def choose(asked: LayoutName, pieces: Sequence[GPTModel], parallel: Parallel, vocabulary: int) -> Layout:
    """The layout of a model whose weights are there. Collective.

    Args:
        asked: In the config.
        pieces: This rank's.
        parallel: This rank's place.
        vocabulary: Token ids are below this.

    Raises:
        BackendError: packed or shared rows were asked for, and this model cannot compute them.
    """
    if asked == "padded":
        return PADDED
    probe = with_places(probe_batch(min(vocabulary, PROBE_VOCABULARY)))
    packing = _everywhere(_packing_obstacle(pieces, parallel) or _difference(pieces, parallel, probe, PACKED), parallel)
    if asked == "packed" and packing:
        raise BackendError(f"sequences cannot share rows: {packing}", fix="set policy.backend.layout: padded")
    if asked == "packed":
        return PACKED
    sharing = packing or _sharing_obstacle(pieces, parallel)
    # Ranks agree before they compute: some have layers of another kind.
    sharing = _everywhere(sharing, parallel)
    sharing = sharing or _everywhere(_difference(pieces, parallel, probe, SHARED), parallel)
    if asked == "shared" and sharing:
        raise BackendError(f"sequences cannot share tokens: {sharing}", fix="set policy.backend.layout: auto")
    if asked == "shared":
        return SHARED
    remarks = [f"each sequence has a padded row of its own: {packing}"] if packing else []
    remarks += [f"{EACH_FOR_ITSELF}: {sharing}"] if sharing else []
    return Layout(packed=not packing, min_ratio=None if sharing else MIN_RATIO, remarks=remarks)


def _everywhere(obstacle: str, parallel: Parallel) -> str:
    """The obstacle, on any rank; empty where there is none. Collective."""
    if not parallel.largest(bool(obstacle)):
        return ""
    return obstacle or "another rank's part of the model does not compute them"


def _packing_obstacle(pieces: Sequence[GPTModel], parallel: Parallel) -> str:
    if parallel.sizes.context > 1 and not all(isinstance(kernel, CoreAttention) for kernel in _kernels(pieces)):
        return "Transformer Engine's attention divides sequences over context-parallel ranks, and here rows are divided"
    return ""


def _sharing_obstacle(pieces: Sequence[GPTModel], parallel: Parallel) -> str:
    if parallel.sizes.context > 1:
        return "context-parallel ranks have parts of rows, and a tree is in one piece"
    if parallel.sizes.virtual_pipeline is not None:
        return "stages in parts need rows of one width"
    if pieces[-1].config.mtp_num_layers:
        return "its MTP layers read the next tokens, and a shared token has several"
    for kernel in _kernels(pieces):
        if not isinstance(kernel, CoreAttention):
            return f"{type(kernel).__name__} attends to whole sequences"
        if not kernel.is_full:
            return "its attention has sliding windows or capped scores"
    return ""


def _kernels(pieces: Sequence[GPTModel]) -> list[torch.nn.Module]:
    return [layer.self_attention.core_attention for piece in pieces for layer in piece.decoder.layers]


@torch.no_grad()
def _difference(pieces: Sequence[GPTModel], parallel: Parallel, probe: TokenBatch, layout: Layout) -> str:
    """How states of sequences differ from those in rows of their own; empty if they do not. Collective."""
    dtype = pieces[0].config.params_dtype
    # As if stages had no parts, which would ask for several microbatches.
    whole = replace(parallel, sizes=replace(parallel.sizes, virtual_pipeline=None))
    (alone,), (together,) = (
        microbatches(probe, PROBE_BUDGET, whole, chosen, dtype=dtype) for chosen in (PADDED, layout)
    )
    differences: list[Tensor] = []
    for piece in pieces:
        expected = _states(piece, alone, parallel)
        try:
            found = _states(piece, together, parallel)
        except Exception as error:  # a kernel that does not serve such rows raises what it likes
            return f"{type(error).__name__}: {error}"
        differences.append((found - expected).norm() / expected.norm())
    worst = float(torch.stack(differences).amax())
    if worst <= TOLERANCE[dtype]:
        return ""
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
    found = states.new_zeros((part.batch.num_tokens, states.shape[-1]), dtype=torch.float32)
    found[part.batch[PLACE][rows.targets]] = part.predicting(states).float()
    if sizes.context > 1:
        dist.all_reduce(found, group=parallel.context_group)
    return found
