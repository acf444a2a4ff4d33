"""Batches cut for ranks, and what ranks say put back in order."""

from __future__ import annotations

import pytest
import torch
from nemorl_tensors import TokenBatch
from nemorl_tensors.sharding import SPAN_TOKENS, cutter, in_order


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64])
def test_what_ranks_say_comes_back_in_the_order_of_the_batch(dtype: torch.dtype) -> None:
    # Sequences of 2, 1 and 3 tokens; rank 0 has the last and the first of them, rank 1 the one between.
    said = torch.tensor([0, 1, 1, 0, 0, 1]).to(dtype)
    first, last, middle = said[:2], said[3:], said[2:3]
    found = in_order(torch.tensor([2, 1, 3]), [[2, 0], [1]], [torch.cat([last, first]), middle])
    assert found.dtype == dtype
    assert found.tolist() == said.tolist()


def test_several_values_of_a_token_stay_together() -> None:
    rows = torch.arange(12.0).view(6, 2)
    found = in_order(torch.tensor([2, 1, 3]), [[2], [0, 1]], [rows[3:], rows[:3]])
    assert torch.equal(found, rows)


def test_a_rank_that_says_too_little_is_noticed() -> None:
    with pytest.raises(AssertionError):
        in_order(torch.tensor([2, 1]), [[0], [1]], [torch.zeros(2), torch.zeros(0)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64])
@pytest.mark.parametrize("size", [1, 2 * SPAN_TOKENS])  # token by token, and span by span
def test_short_and_long_sequences_are_cut_alike(size: int, dtype: torch.dtype) -> None:
    lengths = torch.tensor([size, 2 * size, 3 * size])
    values = (torch.arange(6 * size) % 2).to(dtype)
    stops = torch.cumsum(lengths, 0)
    picked = torch.tensor([2, 0])
    found = cutter((stops - lengths)[picked], lengths[picked])(values)
    assert found.dtype == dtype
    assert torch.equal(found, torch.cat([values[3 * size :], values[:size]]))


def test_a_single_rank_has_the_batch_itself() -> None:
    batch = TokenBatch.from_sequences([[5, 6], [5, 8]], [[False, True], [False, True]])
    assert batch.parts([[0, 1]])[0] is batch
    assert [part.token_ids.tolist() for part in batch.parts([[1], [0]])] == [[5, 8], [5, 6]]
