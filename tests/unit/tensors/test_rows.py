"""Which tokens are computed, and where the scored ones stand."""

from __future__ import annotations

import torch
from nemorl_tensors import TokenBatch
from nemorl_tensors.engines.rows import fed_lengths, first_fit_decreasing, plan_microbatches, to_rows
from nemorl_testing.batches import ragged_batch

# tokens   10 11 12 | 20 21 22 23 | 30 31 | 40
# mask      F  T  T |  F  T  F  F |  F  F |  F
BATCH = TokenBatch.from_sequences(
    [[10, 11, 12], [20, 21, 22, 23], [30, 31], [40]],
    [[False, True, True], [False, True, False, False], [False, False], [True]],
)


def test_only_tokens_before_the_last_scored_one_are_fed() -> None:
    # 12 is predicted by 10 11; 21 by 20; nothing is predicted in the others
    assert fed_lengths(BATCH).tolist() == [2, 1, 0, 0]


def test_padded_rows_are_right_padded_and_indexed() -> None:
    rows = to_rows(BATCH, packed=False)
    assert rows.input_ids.tolist() == [[10, 11], [20, 0]]
    assert rows.position_ids is None
    assert rows.targets.tolist() == [1, 2, 4]  # tokens 11, 12, 21
    assert rows.target_ids.tolist() == [11, 12, 21]
    assert rows.input_ids.flatten()[rows.predictors].tolist() == [10, 11, 20]  # the token just before each


def test_packed_rows_restart_positions_at_each_sequence() -> None:
    rows = to_rows(BATCH, packed=True)
    assert rows.input_ids.tolist() == [[10, 11, 20]]
    assert rows.position_ids is not None
    assert rows.position_ids.tolist() == [[0, 1, 0]]
    assert rows.predictors.tolist() == [0, 1, 2]


def test_the_plan_holds_every_sequence_once_within_the_budget() -> None:
    batch = ragged_batch()
    fed = fed_lengths(batch).tolist()
    for budget in (1, 20, 40, 1000):
        plan = plan_microbatches(batch, budget)
        assert sorted(index for part in plan for index in part) == list(range(len(batch)))
        for part in plan:
            rows = [fed[index] for index in part if fed[index]]
            assert len(rows) <= 1 or len(rows) * max(rows) <= budget


def test_a_packed_plan_counts_real_tokens() -> None:
    batch = ragged_batch()
    fed = fed_lengths(batch).tolist()
    for part in plan_microbatches(batch, 40, padded=False):
        assert len(part) == 1 or sum(fed[index] for index in part) <= 40


def test_an_unscored_batch_makes_no_rows() -> None:
    nothing = TokenBatch.from_sequences([[1, 2, 3]], [[False, False, False]])
    for packed in (False, True):
        rows = to_rows(nothing, packed=packed)
        assert rows.input_ids.numel() == rows.targets.numel() == 0
    assert torch.equal(fed_lengths(nothing), torch.tensor([0]))


def test_a_long_sequence_does_not_pad_the_short_ones() -> None:
    # One row of 400 and eight of 20. Together: 9 * 400 + 700 = 4300. Apart: 400 + 700 + 8 * 20 + 700 = 1960.
    lengths = [21, 21, 401, 21, 21, 21, 21, 21, 21]  # the last token of each is predicted, never fed
    batch = TokenBatch.from_sequences([[5] * n for n in lengths], [[True] * n for n in lengths])
    assert plan_microbatches(batch, 10_000) == [[2], [0, 1, 3, 4, 5, 6, 7, 8]]


def test_packing_puts_each_sequence_into_the_first_row_that_has_room() -> None:
    # Filling one row after the other takes five: 8 | 7 | 6 | 5 4 | 3 2 1.
    lengths = [8, 7, 6, 5, 4, 3, 2, 1]
    found = [[lengths[index] for index in members] for members in first_fit_decreasing(lengths, 10)]
    assert found == [[8, 2], [7, 3], [6, 4], [5, 1]]
    assert first_fit_decreasing([12, 3], 10) == [[0], [1]]
    assert first_fit_decreasing([], 10) == []


def test_packed_microbatches_keep_pairs_together_and_lose_nothing() -> None:
    lengths = [5, 9, 2, 2, 7, 4, 1, 1]
    batch = TokenBatch.from_sequences(
        [[1] * n for n in lengths], [[False] + [True] * (n - 1) for n in lengths], sequences_per_group=2
    )
    # Fed tokens of a pair, the last not being fed: 4 + 8, 1 + 1, 6 + 3, and nothing.
    assert plan_microbatches(batch, 14, padded=False) == [[0, 1, 2, 3], [4, 5, 6, 7]]
