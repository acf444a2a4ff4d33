"""What sequences share is found from their ids, planned by what is computed, and laid out once."""

from __future__ import annotations

import random
from dataclasses import replace

import torch
from nemorl_tensors import TokenBatch
from nemorl_tensors.engines.prefix_forest import PrefixForest, plan_trees
from nemorl_tensors.engines.rows import fed_lengths
from nemorl_tensors.engines.tree_rows import to_tree_rows

# Fed are the tokens before the last scored one:
#   0: 1 2 3 | 4        1: 1 2 3 5 | 6      2: 1 2 | 9       3: 7 | 8       4: like 0, other mask       5: nothing
IDS = [[1, 2, 3, 4], [1, 2, 3, 5, 6], [1, 2, 9], [7, 8], [1, 2, 3, 4], [1, 2, 3, 4]]
MASKS = [
    [False, False, False, True],
    [False, False, True, True, True],
    [False, True, True],
    [True, True],
    [False, False, True, True],
    [False, False, False, False],
]
BATCH = TokenBatch.from_sequences(IDS, MASKS)


def groups(sizes: list[tuple[int, int, int]], seed: int = 0) -> TokenBatch:
    """Groups of (prompt tokens, response tokens, responses), in random order."""
    draw = random.Random(seed)
    rows = []
    for prompt_tokens, response_tokens, count in sizes:
        prompt = [draw.randrange(10**6) for _ in range(prompt_tokens)]
        rows += [prompt + [draw.randrange(10**6) for _ in range(response_tokens)] for _ in range(count)]
    draw.shuffle(rows)
    return TokenBatch.from_sequences(rows, [[False] + [True] * (len(row) - 1) for row in rows])


def tokens_of(batch: TokenBatch, sequences: list[int]) -> int:
    """Different prefixes of the fed tokens: each is one token of the forest."""
    parts = zip(torch.split(batch.token_ids, batch.lengths.tolist()), fed_lengths(batch).tolist(), strict=True)
    fed = [tuple(ids[:count].tolist()) for ids, count in parts]
    return len({fed[i][:end] for i in sequences for end in range(1, len(fed[i]) + 1)})


def test_each_sequence_knows_what_it_shares_with_the_one_before() -> None:
    forest = PrefixForest.of_batch(BATCH)
    assert forest.order.tolist() == [2, 0, 4, 1, 3]  # 12, 123, 123, 1235, 7
    assert forest.common.tolist() == [0, 2, 3, 3, 0]
    assert forest.tokens == 5 == tokens_of(BATCH, list(range(6)))  # 1 2 3 5 7
    assert forest.sequence_tokens == 13
    assert forest.ratio == 13 / 5


def test_the_ratio_of_a_group_is_that_of_the_formula() -> None:
    # G (P + R - 1) / (P + G (R - 1)): the last token of a response is scored, never fed.
    forest = PrefixForest.of_batch(groups([(128, 64, 8)]))
    assert forest.ratio == 8 * 191 / (128 + 8 * 63)


def test_no_sequences_share_nothing() -> None:
    empty = PrefixForest.of_batch(BATCH.select([5]))
    assert (empty.tokens, empty.ratio) == (0, 1.0)
    assert plan_trees(BATCH.select([5]), empty, 10) == [[0]]
    apart = TokenBatch.from_sequences([[1, 2, 3], [4, 5, 6]], [[False, True, True]] * 2)
    assert PrefixForest.of_batch(apart).ratio == 1.0


def test_a_row_holds_each_shared_token_once() -> None:
    rows = to_tree_rows(BATCH, width_multiple=4)
    assert rows.input_ids.tolist() == [[1, 2, 3, 5, 7, 0, 0, 0]]
    assert rows.position_ids is not None
    assert rows.position_ids.tolist() == [[0, 1, 2, 3, 0, 0, 1, 2]]
    assert rows.tree is not None
    assert rows.tree.lengths == (2, 3, 3, 4, 1, 3)  # the last is what pads the row
    assert rows.tree.new == (2, 1, 0, 1, 1, 3)
    assert rows.tree.slots.tolist()[3] == [0, 1, 2, 3]
    # Each scored token of each sequence, and the token before it: 3 predicts 4 twice, and 5.
    before = rows.input_ids.flatten()[rows.predictors].tolist()
    assert list(zip(before, rows.target_ids.tolist(), strict=True)) == [
        (3, 4), (2, 3), (3, 5), (5, 6), (1, 2), (2, 9), (7, 8), (2, 3), (3, 4),
    ]  # fmt: skip


def test_trees_that_fit_stay_whole_and_share_microbatches() -> None:
    batch = groups([(20, 6, 4), (30, 6, 4), (10, 6, 2)])  # 20 + 4 * 5, 30 + 4 * 5, 10 + 2 * 5
    forest = PrefixForest.of_batch(batch)
    plan = plan_trees(batch, forest, 70)
    assert sorted(tokens_of(batch, part) for part in plan) == [40, 70]
    assert sorted(index for part in plan for index in part) == list(range(10))


def test_a_tree_too_large_is_cut_by_leaves() -> None:
    batch = groups([(20, 6, 8)])  # 60 tokens; a piece of 4 leaves has 40
    plan = plan_trees(batch, PrefixForest.of_batch(batch), 40)
    assert [tokens_of(batch, part) for part in plan] == [40, 40]
    # No budget is too small: each sequence alone.
    assert sorted(map(len, plan_trees(batch, PrefixForest.of_batch(batch), 1))) == [1] * 8


def test_branches_are_cut_where_they_share_least() -> None:
    # Two branches of a trunk of 10, each of 10 + 4 leaves of 5: 10 + 2 * (10 + 20) = 70, each branch alone 40.
    draw = random.Random(1)
    ids = [list(range(10)) + [100 * (1 + b)] * 10 + [draw.randrange(9**9) for _ in range(6)] for b in (0, 1)
           for _ in range(4)]  # fmt: skip
    batch = TokenBatch.from_sequences(ids, [[False] + [True] * 25] * 8)
    forest = PrefixForest.of_batch(batch)
    assert forest.tokens == 70
    assert sorted(sorted(part) for part in plan_trees(batch, forest, 45)) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_every_plan_keeps_the_budget_and_each_sequence_once() -> None:
    for seed in range(5):
        batch = groups([(30, 8, 6), (3, 20, 5), (50, 2, 9), (0, 9, 3)], seed)
        for budget in (1, 60, 100, 10_000):
            plan = plan_trees(batch, PrefixForest.of_batch(batch), budget)
            assert sorted(index for part in plan for index in part) == list(range(len(batch)))
            assert all(len(part) == 1 or tokens_of(batch, part) <= budget for part in plan)


def test_pairs_stay_together() -> None:
    # Pairs of one prompt stand apart in the batch, and their sequences mix in any order of ids.
    ids = [[5, 5, 1, 1], [5, 5, 4, 1], [9, 9, 9, 9], [8, 8, 8, 8], [5, 5, 2, 1], [5, 5, 3, 1]]
    batch = replace(TokenBatch.from_sequences(ids, [[False, True, True, True]] * 6), sequences_per_group=2)
    for budget in (1, 7, 1000):
        for part in plan_trees(batch, PrefixForest.of_batch(batch), budget):
            assert all(part[i] + 1 == part[i + 1] and part[i] % 2 == 0 for i in range(0, len(part), 2))
    # 5 5 and four branches are 6 tokens, 9 9 9 and 8 8 8 too.
    assert sorted(plan_trees(batch, PrefixForest.of_batch(batch), 6)) == [[0, 1, 4, 5], [2, 3]]
    assert sorted(batch.shards(2, by_trees=True)) == [[0, 1, 4, 5], [2, 3]]


def test_ranks_get_whole_groups_of_equal_trees() -> None:
    batch = groups([(20, 6, 4)] * 4)
    shards = batch.shards(2, by_trees=True)
    assert [tokens_of(batch, shard) for shard in shards] == [80, 80]
    assert sorted(index for shard in shards for index in shard) == list(range(16))


def test_one_group_is_cut_where_ranks_would_wait() -> None:
    # Whole: 20 + 8 * 5 on one rank and nothing on the other three. Cut in four: 20 + 2 * 5 on each.
    batch = groups([(20, 6, 8)])
    assert [tokens_of(batch, shard) for shard in batch.shards(4, by_trees=True)] == [30, 30, 30, 30]


def test_more_ranks_than_sequences_leave_some_empty() -> None:
    batch = groups([(8, 3, 2)])
    assert sorted(map(len, batch.shards(4, by_trees=True))) == [0, 0, 1, 1]


def test_ranks_are_as_before_where_little_is_shared() -> None:
    batch = groups([(0, 9, 3), (1, 30, 4), (0, 14, 2)])
    assert batch.shards(3, by_trees=True) == batch.shards(3)
