"""How a batch becomes forward passes: equal shapes where stages have parts, chunks where ranks share rows."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("megatron.core", reason="megatron-core is not installed: pip install nemorl-megatron")

from nemorl_megatron.context import ends, own_part
from nemorl_megatron.layout import PADDED
from nemorl_megatron.parallel import Parallel, Place, Sizes
from nemorl_megatron.pipeline import Microbatch, microbatches
from nemorl_tensors import TokenBatch
from nemorl_tensors.engines.rows import Rows, to_rows

pytestmark = pytest.mark.megatron


def place(sizes: Sizes) -> Parallel:
    """The first of two ranks, without process groups."""
    places = tuple(Place(rank, 0, 0, 0, 0, 0, 0) for rank in range(2))
    return Parallel(sizes, 0, "cpu", places)


def batch(*lengths: int, sequences_per_group: int = 1) -> TokenBatch:
    ids = [list(range(1, length + 1)) for length in lengths]
    return TokenBatch.from_sequences(
        ids, [[True] * length for length in lengths], sequences_per_group=sequences_per_group
    )


def test_each_rank_has_an_early_and_a_late_chunk_and_scores_what_they_predict() -> None:
    # 8 tokens on 2 ranks: chunks 01 23 45 67; rank 0 has 01 and 67, rank 1 has 23 and 45
    rows = to_rows(batch(9), packed=False, width_multiple=4)
    assert rows.input_ids.tolist() == [[1, 2, 3, 4, 5, 6, 7, 8]]
    first, second = own_part(rows, 0, 2), own_part(rows, 1, 2)
    assert first.input_ids.tolist() == [[1, 2, 7, 8]]
    assert second.input_ids.tolist() == [[3, 4, 5, 6]]
    assert [part.position_ids.tolist() for part in (first, second)] == [[[0, 1, 6, 7]], [[2, 3, 4, 5]]]
    for part in (first, second):
        # the token that stands where a target is predicted is the one before it
        assert (part.input_ids.flatten()[part.predictors] + 1).tolist() == part.target_ids.tolist()
    assert sorted(first.targets.tolist() + second.targets.tolist()) == rows.targets.tolist()
    assert (ends(4, 0, 2), ends(4, 1, 2)) == ((2, 8), (4, 6))


def test_stages_with_parts_get_passes_of_one_shape_and_a_multiple_of_the_stages() -> None:
    sizes = Sizes(pipeline=2, virtual_pipeline=2)
    for sequences_per_group in (1, 2):
        parts = microbatches(batch(9, 3, 5, 2, 4, 6, sequences_per_group=sequences_per_group), 16, place(sizes), PADDED)
        # the longest row has 8 tokens: two rows of 8 fill 16; three passes and one of nothing
        assert [tuple(part.rows.input_ids.shape) for part in parts] == [(2, 8)] * 4
        assert [part.batch.lengths.tolist() for part in parts] == [[9, 3], [5, 2], [4, 6], []]
        assert all(score_what_follows(part) for part in parts)


def test_a_batch_with_nothing_to_score_is_one_pass_over_padding() -> None:
    for sequences in (batch(), batch(1, 1)):
        parts = microbatches(sequences, 16, place(Sizes(tensor=2, sequence_parallel=True)), PADDED)
        assert [part.rows.input_ids.tolist() for part in parts] == [[[0, 0]]]
        assert parts[0].rows.targets.numel() == 0


def score_what_follows(part: Microbatch) -> bool:
    """Whether the states read are those of the tokens before the targets. A token's state is itself here."""
    states = part.rows.input_ids.t()[..., None]
    return torch.equal(part.predicting(states).flatten() + 1, part.rows.target_ids)


def test_rows_are_found_again_in_states_with_the_sequence_first() -> None:
    ids = torch.tensor([[1, 2, 3], [7, 8, 0]])
    rows = Rows(ids, None, torch.tensor([0, 2, 3]), torch.tensor([1, 3, 5]), torch.tensor([2, 4, 8]))
    part = Microbatch(batch(4, 3), rows)
    assert part.predicting(ids.t()[..., None]).flatten().tolist() == [1, 3, 7]
