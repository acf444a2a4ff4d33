"""Reductions by hand: what crosses microbatches, ranks and minibatches must not become a mean of means."""

from __future__ import annotations

import math

import pytest
from nemorl.observe.metrics import Last, Max, Mean, Metric, Min, Sum, average, merge, values


def test_a_mean_weighs_by_count() -> None:
    # 9 tokens of mean 1 and 1 token of mean 0: 9 / 10, not (1 + 0) / 2.
    assert Mean(9.0, 9).merge(Mean(0.0, 1)).value == 0.9


def test_a_mean_of_nothing_is_zero_and_weighs_nothing() -> None:
    assert Mean.of([]).value == 0.0
    assert Mean.of([]).merge(Mean.of([2.0, 4.0])).value == 3.0


def test_a_mean_of_many_small_numbers_is_exact() -> None:
    assert Mean.of([0.1] * 10) == Mean(1.0, 10)


@pytest.mark.parametrize(
    ("metrics", "merged"),
    [
        ([Sum(1), Sum(2), Sum(3)], 6),
        ([Min(1), Min(-2), Min(3)], -2),
        ([Max(1), Max(-2), Max(3)], 3),
        ([Last(1), Last(-2), Last(3)], 3),
        ([Mean(1, 1), Mean(-2, 1), Mean(3, 2)], 0.5),
    ],
    ids=["sum", "min", "max", "last", "mean"],
)
def test_each_kind_reduces_its_own_way(metrics: list[Metric], merged: float) -> None:
    assert merge([{"x": metric} for metric in metrics])["x"].value == merged


def test_a_metric_that_only_some_parts_have_is_kept() -> None:
    assert values(merge([{"a": Sum(1)}, {"b": Sum(2)}, {"a": Sum(3)}])) == {"a": 4, "b": 2}


def test_merging_nothing_is_nothing() -> None:
    assert merge([]) == {}


def test_merging_in_any_grouping_is_the_same() -> None:
    parts = [{"m": Mean(i, i + 1), "s": Sum(i), "lo": Min(i), "hi": Max(i)} for i in range(4)]
    left = merge([merge(parts[:2]), merge(parts[2:])])
    assert left == merge(parts)


def test_sums_are_averaged_over_optimizer_steps() -> None:
    # loss is a sum within a step and reported per step; token counts inside a Mean keep their weights.
    steps = [
        {"loss": Sum(1.0), "ratio": Mean(9.0, 9), "lr": Last(1e-3)},
        {"loss": Sum(3.0), "ratio": Mean(0.0, 1), "lr": Last(2e-3)},
    ]
    assert values(average(steps)) == {"loss": 2.0, "ratio": 0.9, "lr": 2e-3}


def test_values_drop_extremes_of_nothing_and_keep_other_infinities() -> None:
    metrics = {"lo": Min(math.inf), "hi": Max(-math.inf), "loss": Sum(math.inf), "kept": Max(1)}
    assert values(metrics) == {"loss": math.inf, "kept": 1}


def test_values_take_a_prefix() -> None:
    assert values({"loss": Sum(1.0)}, "train/") == {"train/loss": 1.0}
