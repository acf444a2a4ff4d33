"""Which tokens are computed, and where the scored ones stand."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence

import pytest
import torch
from nemorl_tensors import TokenBatch
from nemorl_tensors.engines import rows as laying_out
from nemorl_tensors.engines.rows import fed_lengths, first_fit_decreasing, plan_microbatches, to_rows
from nemorl_tensors.engines.tree_rows import to_tree_rows
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


@pytest.mark.parametrize("layout", ["padded", "packed", "shared"])
def test_routes_stand_where_their_tokens_do(layout: str) -> None:
    # One layer and two experts: token t of the batch went to t and t + 1. Of the first two sequences 10 11 and 10 20
    # 21 are fed; shared, the 10 stands once, with the routes of the first sequence.
    ids, masks = [[10, 11, 12], [10, 20, 21, 22]], [[False, True, True], [False, True, True, True]]
    places = torch.arange(7, dtype=torch.int16)
    batch = TokenBatch.from_sequences(ids, masks).with_tokens(routes=torch.stack((places, places + 1), -1)[:, None])
    rows = to_tree_rows(batch) if layout == "shared" else to_rows(batch, packed=layout == "packed")
    expected = {
        "padded": ([10, 11, 0, 10, 20, 21], [0, 1, -1, 3, 4, 5]),
        "packed": ([10, 11, 10, 20, 21], [0, 1, 3, 4, 5]),
        "shared": ([10, 11, 20, 21], [0, 1, 4, 5]),
    }[layout]
    assert rows.routes is not None
    assert (rows.input_ids.flatten().tolist(), rows.routes[:, 0, 0].tolist()) == expected
    assert to_rows(BATCH, packed=False).routes is None


def test_the_plan_holds_every_sequence_once_within_the_budget() -> None:
    batch = ragged_batch()
    fed = fed_lengths(batch).tolist()
    for budget in (1, 20, 40, 1000):
        plan = plan_microbatches(batch, budget)
        assert sorted(index for part in plan for index in part) == list(range(len(batch)))
        for part in plan:
            rows = [fed[index] for index in part if fed[index]]
            assert len(rows) <= 1 or len(rows) * max(rows) <= budget


def of_lengths(*fed: int) -> TokenBatch:
    """Sequences of so many tokens before the last one, which is scored."""
    return TokenBatch.from_sequences([[1] * (n + 1) for n in fed], [[False] * n + [True] for n in fed])


def padded_cost(plan: Iterable[Sequence[int]], fed: Sequence[int], each: int) -> int:
    """Padded tokens, and ``each`` for a microbatch."""
    return sum(max(fed[i] for i in part) * len(part) + each for part in plan)


def partitions(items: list[int]) -> Iterator[list[list[int]]]:
    """All ways to part the items."""
    if not items:
        yield []
        return
    first, rest = items[0], items[1:]
    for parts in partitions(rest):
        yield [[first], *parts]
        for place, part in enumerate(parts):
            yield [*parts[:place], [first, *part], *parts[place + 1 :]]


def test_padded_rows_are_cut_where_first_fit_would_fill_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of 9, 8, 2, 2 and 1 tokens within 40. First fit puts four into the first microbatch: 4 x 9 + 1 = 37 tokens.
    Cut after the second they are 2 x 9 + 3 x 2 = 24."""
    monkeypatch.setattr(laying_out, "MICROBATCH_COST_TOKENS", 3)
    assert plan_microbatches(of_lengths(2, 9, 1, 2, 8), 40) == [[1, 4], [0, 3, 2]]


def test_no_plan_of_padded_rows_computes_less(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(laying_out, "MICROBATCH_COST_TOKENS", 5)
    draw = random.Random(0)
    for _ in range(25):
        fed = [draw.randint(1, 20) for _ in range(6)]
        budget = draw.randint(10, 80)
        allowed = (
            plan
            for plan in partitions([*range(6)])
            if all(len(part) == 1 or max(fed[i] for i in part) * len(part) <= budget for part in plan)
        )
        least = min(padded_cost(plan, fed, 5) for plan in allowed)  # of 203 partitions
        assert padded_cost(plan_microbatches(of_lengths(*fed), budget), fed, 5) == least


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
