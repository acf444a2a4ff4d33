"""Reductions by hand: what crosses microbatches, ranks and minibatches must not become a mean of means."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import pytest
from nemorl.config.load import load_config
from nemorl.errors import ConfigError
from nemorl.metrics import Histogram, Last, Max, Mean, Metric, MetricInfo, Min, Sum, average, is_called, merge, values
from nemorl.plugins import Registry, registry
from nemorl.plugins.kinds import DatasetConfig


def test_a_mean_weighs_by_count() -> None:
    # 9 tokens of mean 1 and 1 token of mean 0: 9 / 10, not (1 + 0) / 2.
    assert Mean(9.0, 9).merge(Mean(0.0, 1)).value == 0.9


def test_a_mean_of_nothing_is_zero_and_weighs_nothing() -> None:
    assert Mean.of([]).value == 0.0
    assert Mean.of([]).merge(Mean.of([2.0, 4.0])).value == 3.0


def test_a_mean_of_many_small_numbers_is_exact() -> None:
    assert Mean.of([0.1] * 10) == Mean(1.0, 10)


@pytest.mark.parametrize(
    ("items", "total"), [([math.inf, -math.inf], math.nan), ([1e308, 1e308], math.inf), ([math.inf, 1.0], math.inf)]
)
def test_what_has_no_finite_sum_is_no_error(items: list[float], total: float) -> None:
    assert Sum.of(items).value == pytest.approx(total, nan_ok=True)
    assert Mean.of(items).total == pytest.approx(total, nan_ok=True)


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


# Quantiles


def test_quantiles_by_hand() -> None:
    # 90 zeros, 9 values of 0.1 and one of 3: half are at most 0, 99 % at most 0.1, all at most 3.
    # 0.1 = 10^-1 is the lower end of its cell; 3 lies between 10^0.45 = 2.818 and 10^0.5 = 3.162.
    histogram = Histogram.of([0.0] * 90 + [0.1 * 1.001] * 9 + [3.0])
    assert values({"error": histogram}, "train/") == {
        "train/error/p50": 0.0,
        "train/error/p99": pytest.approx(0.1),
        "train/error/p999": pytest.approx(10**0.45),
    }
    assert histogram.count == 100


def test_quantiles_of_parts_are_quantiles_of_the_whole() -> None:
    draw = random.Random(0)
    numbers = [math.exp(draw.gauss(-5, 3)) for _ in range(1000)]
    whole = Histogram.of(numbers)
    for size in (1, 7, 500):
        parts = [{"x": Histogram.of(numbers[start : start + size])} for start in range(0, 1000, size)]
        assert merge(parts) == {"x": whole}
        assert average(parts) == {"x": whole}


def test_a_quantile_is_understated_by_a_cell_at_most() -> None:
    draw = random.Random(1)
    numbers = sorted(10 ** draw.uniform(-7, 1.5) for _ in range(999))
    for q in (0.001, 0.3, 0.5, 0.99, 0.999, 1.0):
        exact = numbers[math.ceil(q * 999) - 1]
        assert 0.89 * exact < Histogram.of(numbers).quantile(q) <= exact


@pytest.mark.parametrize(
    ("value", "reported"),
    [(0.0, 0.0), (9e-9, 0.0), (99.9, 10**1.95), (100.0, 100.0), (1e30, 100.0), (math.inf, 100.0), (math.nan, 100.0)],
)
def test_values_beyond_the_cells_count_at_the_ends(value: float, reported: float) -> None:
    assert Histogram.of([value]).quantile(1.0) == pytest.approx(reported)


def test_quantiles_of_nothing_are_not_logged() -> None:
    assert math.isnan(Histogram.of([]).value)
    assert values({"error": Histogram.of([]), "kept": Sum(1.0)}) == {"kept": 1.0}


def test_every_kind_is_made_of_values_alike() -> None:
    numbers = (3.0, -1.0, 2.5)
    assert [kind.of(numbers).value for kind in (Mean, Sum, Min, Max)] == [1.5, 4.5, -1.0, 3.0]
    assert values({"min": Min.of(()), "max": Max.of(()), "sum": Sum.of(()), "mean": Mean.of(())}) == {
        "sum": 0.0,
        "mean": 0.0,
    }
    for kind in (Mean, Sum, Min, Max):
        assert kind.of(numbers).merge(kind.of((9.0,))) == kind.of((*numbers, 9.0))


def test_an_update_that_all_ranks_skipped_was_skipped_once() -> None:
    import torch
    from nemorl_tensors import TokenBatch
    from nemorl_tensors.engines.steps import StepResult, pass_metrics, update_metrics

    batch = TokenBatch.from_sequences([[1, 2, 3]], [[False, True, True]])

    def update(*, skipped: bool) -> dict[str, float]:
        result = StepResult(grad_norm=2.0, lr=0.1, skipped=skipped)
        of_rank = {**pass_metrics(batch, [], [torch.tensor(0.5)]), **update_metrics(result)}
        return merge([of_rank] * 4)  # type: ignore[return-value]

    # Four ranks, two updates of which one was skipped: half of the updates, the tokens and losses of all ranks each.
    found = values(average([update(skipped=True), update(skipped=False)]))  # type: ignore[list-item]
    assert found == {
        "loss": 2.0,
        "grad_norm": 2.0,
        "lr": 0.1,
        "skipped_updates": 0.5,
        "global_valid_toks": 8.0,
        "global_valid_seqs": 4.0,
    }


def test_no_order_of_values_hides_a_nan() -> None:
    nan = math.nan
    for kind in (Min, Max):
        for numbers in ((nan, 1.0), (1.0, nan), (0.0, nan, 2.0)):
            assert math.isnan(kind.of(numbers).value)
        assert math.isnan(kind(1.0).merge(kind(nan)).value)
        assert math.isnan(kind(nan).merge(kind(1.0)).value)


@pytest.mark.parametrize(
    ("name", "declared", "is_same"),
    [
        ("train/loss", "train/loss", True),
        ("train/losses", "train/loss", False),
        ("train/reward/format", "train/reward/<part>", True),
        ("train/reward/a/b\n", "train/reward/<part>", True),
        ("train/reward/", "train/reward/<part>", False),
        ("train/reward", "train/reward/<part>", False),
        ("validation/pass@16", "validation/pass@<k>", True),
        ("validation/passX16", "validation/pass@<k>", False),
        ("train/abc", "train/a.c", False),
    ],
)
def test_a_name_is_declared_itself_or_by_a_pattern(name: str, declared: str, is_same: bool) -> None:
    assert is_called(name, declared) is is_same


def test_every_metric_of_our_plugins_says_what_it_is() -> None:
    loaded = [
        registry().load(kind, entry.id)
        for kind in ("algorithms", "environments")
        for entry in registry().index.of_kind(kind)
        if entry.distribution.startswith("nemorl-")
    ]
    assert len(loaded) > 20
    for config_class in loaded:
        units: dict[str, set[str]] = {}
        for name, info in config_class.metrics.items():
            assert info.meaning, name
            assert info.title or "<" in name, name
            for text in (info.title, info.unit, info.meaning, info.watch_for):
                assert len(text) < 200, name
                assert not re.search(r"\n|\]\(|\.$", text), name
            units.setdefault(info.title, set()).add(info.unit)
        # Metrics of one title share a chart, and a chart has one axis.
        assert not {title for title, found in units.items() if len(found) > 1}, config_class


def test_a_checkpoint_may_be_ranked_by_what_any_part_of_a_run_declares(
    nemorl_registry: Registry, tiny_model: Path
) -> None:
    class Rows(DatasetConfig):
        metrics: ClassVar[Mapping[str, MetricInfo]] = {"rows/seen": MetricInfo("Rows")}

    nemorl_registry.register("datasets", "rows", Rows)
    ranked = {"algorithm": "sft", "model": str(tiny_model), "checkpoint": {"metric": "rows/seen"}}
    for place in ({"data": "rows"}, {"validation": {"data": "rows"}}):
        assert load_config(ranked | place).checkpoint.metric == "rows/seen"
    with pytest.raises(ConfigError) as refused:
        load_config(ranked | {"data": "arithmetic"})
    assert [problem.path for problem in refused.value.problems] == ["checkpoint.metric"]
