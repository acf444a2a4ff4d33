"""Pairs in a batch: order, weights and metrics."""

from __future__ import annotations

import pytest
import torch
from nemorl_tensors import TokenBatch, pair_batch, pair_weights, preference_metrics, split_pairs

LONG = ([1, 2, 3, 4], [False, True, True, True])
SHORT = ([1, 2], [False, True])
CUT = ([1, 2], [False, False])
"""A prompt that filled the length limit."""


def three_pairs() -> TokenBatch:
    return pair_batch([LONG, SHORT, CUT], [SHORT, LONG, CUT])


def test_chosen_and_rejected_take_turns() -> None:
    batch = three_pairs()
    assert batch.lengths.tolist() == [4, 2, 2, 4, 2, 2]
    assert batch.sequences_per_group == 2
    chosen, rejected = split_pairs(batch.lengths)
    assert (chosen.tolist(), rejected.tolist()) == ([4, 2, 2], [2, 4, 2])


def test_every_pair_with_something_to_learn_weighs_the_same() -> None:
    # Two of three pairs train: 1 / 2 each, however long their responses are.
    assert pair_weights(three_pairs()).tolist() == pytest.approx([0.5, 0.5, 0.0])


@pytest.mark.parametrize("empty", [CUT, ([1], [False]), ([1], [True])])
def test_a_pair_with_one_side_to_learn_takes_no_weight_from_the_others(
    empty: tuple[list[int], list[bool]],
) -> None:
    # Two whole pairs, one without a rejected and one without a chosen response: 1 / 2, 1 / 2, 0, 0.
    batch = pair_batch([LONG, LONG, SHORT, empty], [SHORT, empty, LONG, LONG])
    assert pair_weights(batch).tolist() == pytest.approx([0.5, 0.0, 0.5, 0.0])
    assert batch.loss_weights.sum().item() == pytest.approx(1.0)
    assert [bool(mask.any()) for mask in batch.mask.split(batch.lengths.tolist())] == [True] * 2 + [False] * 2 + [
        True
    ] * 2 + [False] * 2


def test_weights_of_a_part_are_those_of_the_whole() -> None:
    part = three_pairs().select([2, 3])
    assert pair_weights(part).tolist() == pytest.approx([0.5])


def test_metrics_count_what_they_are_told_to() -> None:
    counted = torch.tensor([True, True, False])
    found = preference_metrics(torch.tensor([2.0, 0.0, float("nan")]), torch.tensor([-1.0, 1.0, float("nan")]), counted)
    values = {name: metric.value for name, metric in found.items()}
    assert values == {
        "accuracy": 0.5,  # 2 > -1, but 0 < 1
        "rewards_chosen_mean": 1.0,  # (2 + 0) / 2
        "rewards_rejected_mean": 0.0,  # (-1 + 1) / 2
        "rewards_margin_mean": 1.0,  # (3 - 1) / 2
        "num_valid_samples": 2.0,
    }
