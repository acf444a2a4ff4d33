"""Positions in three dimensions, from token ids alone, are those of transformers for each sequence by itself."""

from __future__ import annotations

import random

import pytest
import torch
from nemorl.media import PLACE_BITS, Media, is_media, media_runs
from nemorl_media.positions import Grid, positions_in_3d
from nemorl_tensors.batch import TokenBatch
from nemorl_tensors.engines.rows import Rows, to_rows
from nemorl_tensors.engines.tree_rows import to_tree_rows
from nemorl_testing.seeing_parts import words
from seen_families import Seer, seer
from torch import Tensor


def item(number: int) -> Media:
    return Media("image", bytes([number]))


def rows_of(sequences: list[list[int]], media: list[Media], layout: str) -> Rows:
    # The last token, which nobody feeds, is the one that is scored.
    fed = [[*ids, 7] for ids in sequences]
    batch = TokenBatch.from_sequences(fed, [[False] * len(ids) + [True] for ids in sequences], media=media)
    return to_tree_rows(batch) if layout == "shared" else to_rows(batch, packed=layout == "packed")


def of_sequence(rows: Rows, positions_3RW: Tensor, sequences: list[list[int]], index: int) -> Tensor:
    """[3, n] of one sequence in rows of any layout."""
    count = len(sequences[index])
    if rows.tree is None and rows.position_ids is None:
        return positions_3RW[:, index, :count]
    if rows.tree is None:
        start = sum(map(len, sequences[:index]))
        return positions_3RW[:, 0, start : start + count]
    for slots, length in zip(rows.tree.slots, rows.tree.lengths, strict=True):
        if rows.input_ids[0, slots[:length]].tolist() == sequences[index]:
            return positions_3RW[:, 0, slots[:length]]
    raise AssertionError("the sequence is not in the tree")


def by_transformers(of: Seer, ids: list[int], grids: dict[int, Grid]) -> Tensor:
    """[3, n]"""
    image = of.family.placeholders["image"]
    merged = of.model.config.vision_config.spatial_merge_size
    shown = [grids[ids[start] >> PLACE_BITS] for start, _ in media_runs(ids)]
    if not shown:
        return torch.arange(len(ids)).expand(3, -1)
    sizes = torch.tensor([(frames, rows * merged, columns * merged) for frames, rows, columns in shown])
    found, _ = of.model.model.get_rope_index(
        torch.tensor([words(ids, image)]),
        mm_token_type_ids=torch.tensor([[int(is_media(token)) for token in ids]]),
        image_grid_thw=sizes,
    )
    return found[:, 0]


def drawn(dice: random.Random) -> tuple[list[list[int]], dict[int, Grid], list[Media]]:
    """Some sequences that begin alike, of text and items with text between, and the items' sizes."""
    media = [item(number) for number in range(4)]
    grids = {one.name: (1, dice.randint(1, 5), dice.randint(1, 5)) for one in media}

    def part() -> list[int]:
        text = [dice.randint(8, 200) for _ in range(dice.randint(1, 6))]
        rows, columns = grids[(one := dice.choice(media)).name][1:]
        return text + list(one.token_ids(rows * columns)) * dice.randint(0, 1) + [dice.randint(8, 200)]

    stem = [token for _ in range(dice.randint(0, 3)) for token in part()]
    sequences = {tuple(stem + [token for _ in range(dice.randint(1, 4)) for token in part()]) for _ in range(5)}
    return [list(ids) for ids in sequences], grids, media


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl"])
@pytest.mark.parametrize("layout", ["padded", "packed", "shared"])
def test_of_random_sequences(kind: str, layout: str) -> None:
    of, dice = seer(kind), random.Random(0)
    for _ in range(20):
        sequences, grids, media = drawn(dice)
        rows = rows_of(sequences, media, layout)
        found = positions_in_3d(rows, grids)
        for index, ids in enumerate(sequences):
            assert of_sequence(rows, found, sequences, index).equal(by_transformers(of, ids, grids))


def test_adjacent_items_begin_after_one_another() -> None:
    one, two = item(1), item(2)
    # Two rows, three columns at 1: rows 1 1 1 2 2 2, columns 1 2 3 1 2 3; the longest side is 3, so the next is at 4.
    sequence = [9, *one.token_ids(6), *two.token_ids(2), *two.token_ids(2), 9]
    found = positions_in_3d(rows_of([sequence], [one, two], "padded"), {one.name: (1, 2, 3), two.name: (1, 2, 1)})
    assert found[:, 0].tolist() == [
        [0, 1, 1, 1, 1, 1, 1, 4, 4, 6, 6, 8],
        [0, 1, 1, 1, 2, 2, 2, 4, 5, 6, 7, 8],
        [0, 1, 2, 3, 1, 2, 3, 4, 4, 6, 6, 8],
    ]


def test_text_after_a_flat_item_stands_as_far_on_as_the_item_has_tokens() -> None:
    one = item(1)
    # A 1 x 4 item: what follows stands at 1 + 4, as many places as tokens.
    found = positions_in_3d(rows_of([[9, *one.token_ids(4), 9, 9]], [one], "packed"), {one.name: (1, 1, 4)})
    assert found[0, 0].tolist() == [0, 1, 1, 1, 1, 5, 6]
