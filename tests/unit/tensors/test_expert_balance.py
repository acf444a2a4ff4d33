"""The auxiliary loss and the moving bias, by hand and beside transformers; whose tokens stand where in rows."""

from __future__ import annotations

import pytest
import torch
from nemorl_tensors.engines.routers import balance_loss, moved_bias, sequence_loads
from nemorl_tensors.engines.rows import fed_lengths, to_rows
from nemorl_tensors.engines.tree_rows import to_tree_rows
from nemorl_testing.batches import branching_batch, ragged_batch
from torch import Tensor
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func


def chosen(scores_TE: Tensor, count: int) -> Tensor:
    return torch.zeros_like(scores_TE, dtype=torch.bool).scatter(1, scores_TE.topk(count).indices, value=True)


def test_the_loss_by_hand() -> None:
    scores = torch.tensor([[0.6, 0.2], [0.3, 0.1], [1.0, 1.0], [9.0, 9.0]], requires_grad=True)
    picks = torch.tensor([[True, False], [True, False], [False, True], [True, False]])
    # The last row is padding. The first sequence has rows 0 and 1, the second rows 0 and 2.
    places, owners = torch.tensor([0, 1, 0, 2]), torch.tensor([0, 0, 1, 1])
    loads = sequence_loads(picks, places, owners, 2)
    assert loads.tolist() == [[2, 0], [1, 1]]
    loss = balance_loss(scores, loads, places, owners)
    # Normalised: 3/4 1/4; 3/4 1/4; 1/2 1/2. First: f = 1 0, P = 3/4: 2 tokens * 2 experts * 3/4 = 3. Second: f = 1/2
    # each, and P adds up to 1: 2 * 2 * 1/2 = 2.
    assert float(loss) == pytest.approx(5.0)
    loss.backward()
    assert scores.grad is not None
    # d(2 s0 / (s0 + s1)) = 2 s1 / sum^2 of row 0, where sum = 0.8: the second sequence's part is constant.
    assert scores.grad[0].tolist() == pytest.approx([2 * 0.2 / 0.64, -2 * 0.6 / 0.64])
    assert scores.grad[2:].abs().max() < 1e-6


def test_of_one_sequence_it_is_that_of_transformers() -> None:
    logits = torch.randn(11, 6, generator=torch.Generator().manual_seed(0))
    scores, places, owners = logits.softmax(-1), torch.arange(11), torch.zeros(11, dtype=torch.int64)
    loads = sequence_loads(chosen(scores, 2), places, owners, 1)
    ours = balance_loss(scores, loads, places, owners) / 11
    # Theirs adds up shares of first and of second choices; here each is one of 2 choices.
    theirs = load_balancing_loss_func((logits,), 6, 2)
    assert float(ours) == pytest.approx(float(theirs) / 2, rel=1e-6)


def test_an_even_load_costs_one_for_each_token() -> None:
    scores, owners = torch.full((8, 4), 0.25), torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
    picks = torch.eye(4, dtype=torch.bool).repeat(2, 1)
    loads = sequence_loads(picks, torch.arange(8), owners, 2)
    assert float(balance_loss(scores, loads, torch.arange(8), owners)) == pytest.approx(8.0)


def test_a_bias_falls_where_the_load_is_high() -> None:
    bias, loads = torch.tensor([0.5, 0.5, 0.5, 0.5]), torch.tensor([6.0, 4.0, 4.0, 2.0], dtype=torch.float64)
    assert moved_bias(bias, loads, 0.25).tolist() == [0.25, 0.5, 0.5, 0.75]
    assert moved_bias(bias, loads, 0.25).dtype == torch.float32


@pytest.mark.parametrize("make", [ragged_batch, branching_batch])
@pytest.mark.parametrize("layout", ["padded", "packed", "tree"])
def test_rows_say_whose_tokens_they_hold(make: type, layout: str) -> None:
    batch = make()
    if layout == "tree":
        rows = to_tree_rows(batch, width_multiple=4)
    else:
        rows = to_rows(batch, packed=layout == "packed", width_multiple=4)
    held = rows.input_ids.flatten()[rows.places]
    starts = torch.cumsum(batch.lengths, 0) - batch.lengths
    for sequence, fed in enumerate(fed_lengths(batch).tolist()):
        mine = held[rows.owners == sequence]
        first = int(starts[sequence])
        assert mine.tolist() == batch.token_ids[first : first + fed].tolist()
