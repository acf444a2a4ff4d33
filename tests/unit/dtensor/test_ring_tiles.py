"""What a ring computes: runs of tokens that the same columns see, cut into tiles, against a mask of all pairs."""

from __future__ import annotations

import pytest
import torch
from nemorl_dtensor.attention_lse import Part, attention, attention_backward
from nemorl_dtensor.ring import _merge
from nemorl_dtensor.ring_tiles import Run, Tile, chunks_of, runs_of, tiles_of
from nemorl_tensors import TokenBatch
from nemorl_tensors.engines.rows import Tree
from nemorl_tensors.engines.tree_rows import to_tree_rows
from torch import Tensor


def tree_of(*sequences: list[int], multiple: int = 1) -> tuple[Tree, int]:
    """The forest of sequences of token ids, of which the last token is only scored, and the width of its row."""
    batch = TokenBatch.from_sequences([[*ids, 99] for ids in sequences], [[True] * (len(ids) + 1) for ids in sequences])
    rows = to_tree_rows(batch, width_multiple=multiple)
    assert rows.tree is not None
    return rows.tree, rows.input_ids.shape[1]


def seen_by(tree: Tree, width: int) -> Tensor:
    """[W, W] bool: the row's token sees the column's, from the paths of all sequences."""
    seen = torch.zeros(width, width, dtype=torch.bool)
    for slots, length, new in zip(tree.slots.tolist(), tree.lengths, tree.new, strict=True):
        for depth in range(length - new, length):
            seen[slots[depth], slots[: depth + 1]] = True
    return seen


def computed(tiles: tuple[Tile, ...], queries: list[int], keys: list[int], width: int) -> Tensor:
    """[W, W] how often each score is computed."""
    found = torch.zeros(width, width, dtype=torch.int64)
    for tile in tiles:
        rows, columns = queries[tile.queries], keys[tile.keys]
        for place, row in enumerate(rows):
            for column in columns[: place + 1] if tile.causal else columns:
                found[row, column] += 1
    return found


def test_runs_end_where_the_last_sequence_that_has_them_ends() -> None:
    # Columns: 0 1 = prompt, 2 = shared by two responses, 3 | 4 5 their ends, 6 = a third one, 7 8 = another prompt.
    tree, width = tree_of([1, 2, 3, 4], [1, 2, 3, 5, 6], [1, 2, 7], [8, 9])
    assert width == 9
    assert runs_of(tree, width) == [
        Run(0, 2, 7),
        Run(2, 3, 6),
        Run(3, 4, 4),
        Run(4, 6, 6),
        Run(6, 7, 7),
        Run(7, 9, 9),
    ]


def test_a_beginning_of_another_sequence_is_a_path_of_its_own() -> None:
    # [1, 2] has no token of its own; what comes after [1, 2, 3] shares one token of it.
    tree, width = tree_of([1, 2], [1, 2, 3], [1, 4])
    assert runs_of(tree, width) == [Run(0, 1, 4), Run(1, 2, 3), Run(2, 3, 3), Run(3, 4, 4)]


def test_a_row_of_one_sequence_is_a_run() -> None:
    assert runs_of(None, 12) == [Run(0, 12, 12)]


def test_each_rank_has_an_early_and_a_late_chunk() -> None:
    assert [[*early, *late] for early, late in (chunks_of(rank, 3, 12) for rank in range(3))] == [
        [0, 1, 10, 11],
        [2, 3, 8, 9],
        [4, 5, 6, 7],
    ]


def test_ranks_compute_as_many_scores_of_a_long_row() -> None:
    width, ranks = 24, 3
    columns = [[column for chunk in chunks_of(rank, ranks, width) for column in chunk] for rank in range(ranks)]
    counts = [
        sum(
            int(computed(tiles, columns[rank], columns[owner], width).sum())
            for owner, tiles in enumerate(tiles_of(runs_of(None, width), rank, ranks, width))
        )
        for rank in range(ranks)
    ]
    # 24 * 25 / 2 = 300 scores in all.
    assert counts == [100, 100, 100]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize(
    "sequences",
    [
        ([1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 8, 9], [1, 2, 3, 8], [1, 5, 6, 7], [4], [5, 6, 7, 8, 9, 10, 11]),
        ([1, 2, 3], [4, 5], [6], [7, 8, 9, 10]),
        ([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13],),
    ],
)
def test_tiles_cover_what_is_seen_once_and_nothing_else(sequences: tuple[list[int], ...], ranks: int) -> None:
    tree, width = tree_of(*sequences, multiple=2 * ranks)
    columns = [[column for chunk in chunks_of(rank, ranks, width) for column in chunk] for rank in range(ranks)]
    assert sorted(column for each in columns for column in each) == [*range(width)]
    found = torch.zeros(width, width, dtype=torch.int64)
    for rank in range(ranks):
        for owner, tiles in enumerate(tiles_of(runs_of(tree, width), rank, ranks, width)):
            found += computed(tiles, columns[rank], columns[owner], width)
    assert torch.equal(found, seen_by(tree, width).long())


HEADS = [(4, 4, 8, 8), (6, 2, 8, 8), (3, 1, 12, 5), (2, 2, 5, 12)]
"""Of queries and of keys, numbers of a head of keys and of one of values"""


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("heads", "kv_heads", "size", "value_size"), HEADS)
def test_parts_merge_to_attention_over_all_keys(
    heads: int, kv_heads: int, size: int, value_size: int, device: str
) -> None:
    torch.manual_seed(1)
    query = torch.randn(2, heads, 5, size, device=device, requires_grad=True)
    key = torch.randn(2, kv_heads, 9, size, device=device, requires_grad=True)
    value = torch.randn(2, kv_heads, 9, value_size, device=device, requires_grad=True)
    grad = torch.randn(2, heads, 5, value_size, device=device)
    # Queries see four keys before them, and then themselves.
    mask = torch.ones(5, 9, dtype=torch.bool, device=device).tril(4)
    share = heads // kv_heads
    scores = query @ key.repeat_interleave(share, 1).transpose(2, 3) * 0.3
    expected = torch.softmax(scores.masked_fill(~mask, -torch.inf), -1) @ value.repeat_interleave(share, 1)
    expected.backward(grad)

    places = ((slice(0, 4), False), (slice(4, 9), True))
    parts = [Part(query.detach(), key.detach()[:, :, k], value.detach()[:, :, k], causal, 0.3) for k, causal in places]
    out, lse = torch.zeros_like(expected), torch.full((2, heads, 5), -torch.inf, device=device)
    for part in parts:
        _merge(out, lse, *attention(part))
    torch.testing.assert_close(out, expected.detach(), atol=1e-6, rtol=1e-5)
    found = [attention_backward(part, grad, out, lse) for part in parts]
    for gradient, wanted in (
        (found[0][0] + found[1][0], query.grad),
        (torch.cat((found[0][1], found[1][1]), 2), key.grad),
        (torch.cat((found[0][2], found[1][2]), 2), value.grad),
    ):
        torch.testing.assert_close(gradient, wanted, atol=2e-6, rtol=1e-5)
