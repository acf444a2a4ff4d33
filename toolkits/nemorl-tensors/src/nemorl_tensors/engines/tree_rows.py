"""The shared layout: one row in which tokens that sequences have in common stand once.

# N = tokens of all sequences concatenated, S = different sequences, L = longest one, W = row width

The row holds, sequence by sequence in lexicographic order, the tokens that the sequences before do not have. Their
position ids are their depths. A state that several sequences have predicts the next token of each: the map from states
to scored tokens has duplicates, and the gradients of what they are scored for add up. The routes of a token that
sequences share are those of the first of them.
"""

from __future__ import annotations

import numpy
import torch

from nemorl_tensors.batch import TokenBatch
from nemorl_tensors.engines.prefix_forest import Ints, PrefixForest
from nemorl_tensors.engines.rows import PAD_ID, Rows, Tree, slotted_routes
from nemorl_tensors.logprobs import next_token_targets


def to_tree_rows(
    batch: TokenBatch, *, width_multiple: int = 1, candidates: bool = False, forest: PrefixForest | None = None
) -> Rows:
    """The microbatch as its prefix forest, in one row padded to a multiple of ``width_multiple``.

    Padding is a sequence of its own. ``candidates`` is that of ``to_rows``; ``forest`` that of the batch, if known.
    """
    device = batch.lengths.device
    forest = PrefixForest.of_batch(batch) if forest is None else forest
    new = forest.lengths - forest.common
    width = -(-forest.tokens // width_multiple) * width_multiple
    padding = width - forest.tokens
    slots = _slots(forest, padding)

    # Sequence by sequence, the tokens that those before do not have, and their depths.
    lengths = batch.lengths.cpu().numpy()
    starts = lengths.cumsum() - lengths
    owners = numpy.repeat(numpy.arange(len(new)), new)
    position_ids = numpy.arange(width, dtype=numpy.int64)
    position_ids[: forest.tokens] -= (new.cumsum() - new - forest.common)[owners]
    position_ids[forest.tokens :] -= forest.tokens
    input_ids = numpy.full(width, PAD_ID, dtype=numpy.int64)
    places = starts[forest.order][owners] + position_ids[: forest.tokens]
    input_ids[: forest.tokens] = batch.token_ids.cpu().numpy()[places]
    filled = torch.arange(forest.tokens, device=device)

    targets = next_token_targets(batch.mask, batch.lengths)
    rows = numpy.zeros(len(batch), dtype=numpy.int64)
    rows[forest.order] = numpy.arange(len(forest.order))
    scored = targets.cpu().numpy()
    sequences = numpy.repeat(numpy.arange(len(batch)), lengths)[scored]
    predictors = slots[rows[sequences], scored - starts[sequences] - 1]
    is_held = numpy.arange(slots.shape[1]) < forest.lengths[:, None]
    extra = (padding,) if padding else ()
    tree = Tree(torch.from_numpy(slots).to(device), (*forest.lengths.tolist(), *extra), (*new.tolist(), *extra))
    return Rows(
        input_ids=torch.from_numpy(input_ids).to(device)[None],
        position_ids=torch.from_numpy(position_ids).to(device)[None],
        predictors=torch.from_numpy(predictors).to(device),
        targets=targets,
        target_ids=(batch["candidate_ids"] if candidates else batch.token_ids)[targets],
        tree=tree,
        real_tokens=width - padding,
        media=batch.media,
        places=torch.from_numpy(slots[: len(new)][is_held]).to(device),
        owners=torch.from_numpy(numpy.repeat(forest.order, forest.lengths)).to(device),
        routes=slotted_routes(batch, filled, torch.from_numpy(places).to(device), width),
    )


def _slots(forest: PrefixForest, padding: int) -> Ints:
    """[S, L] where each token of each sequence stands, those of ``padding`` more at the end as the last sequence."""
    lengths = numpy.append(forest.lengths, [padding] if padding else []).astype(numpy.int64)
    common = numpy.append(forest.common, [0] if padding else []).astype(numpy.int64)
    new = lengths - common
    depths = numpy.arange(int(lengths.max(initial=0)), dtype=numpy.int64)
    own = (new.cumsum() - new - common)[:, None] + depths
    is_own = (depths >= common[:, None]) & (depths < lengths[:, None])
    # A token in common stands where it does for the sequence before; slots grow from sequence to sequence.
    slots: Ints = numpy.maximum.accumulate(numpy.where(is_own, own, 0), axis=0) if len(lengths) else own
    return numpy.where(depths < lengths[:, None], slots, 0)
