"""The benchmark of weights that travel as changes: its floor, by hand, and a trial run."""

from __future__ import annotations

import math

import pytest
import torch


@pytest.fixture
def delta_sync(load_benchmark):
    return load_benchmark("delta_sync")


def test_the_floor_is_the_entropy_of_places_and_of_values(delta_sync):
    old = {"a": torch.zeros(8, dtype=torch.int16), "b": torch.ones(5)}
    new = {"a": torch.tensor([1, 0, 0, 1, 2, 0, 0, 2], dtype=torch.int16), "b": torch.ones(5)}
    # Four of eight have changed: one bit each of the eight. Two values, equally often: one bit each of the four.
    changed, floor = delta_sync.floor_bytes(old, new)
    assert (changed, floor) == (4, (8 + 4) / 8)
    new["a"] = torch.tensor([1, 0, 0, 0, 0, 0, 0, 1], dtype=torch.int16)
    # Two of eight: 8 * (1/4 * log2 4 + 3/4 * log2 4/3) bits, and a value that is always the same: none.
    assert delta_sync.floor_bytes(old, new) == (2, pytest.approx((2 * 2 + 6 * math.log2(4 / 3)) / 8))


@pytest.mark.slow
@pytest.mark.full
def test_a_trial_run_sends_what_was_learnt_and_less_than_all(delta_sync, tmp_path):
    from _common import write_model

    case = delta_sync.run_case(write_model(tmp_path / "tiny"), "bfloat16", 1e-5, steps=2, tokens=48)
    medians = case["medians"]
    assert case["fallbacks"] == 0
    assert medians["floor_bytes"] < medians["changes_bytes"] < medians["uncoded_bytes"] < medians["whole_bytes"]
    assert 0 < medians["changed_frac"] < 1
