"""Rows of several sources: proportions, epochs, and a position that is one integer."""

from __future__ import annotations

from collections import Counter
from typing import Any

import nemorl
import pytest
from nemorl.errors import DataError, UsageError
from nemorl_rl.data.mixtures import Joined, Mixture, RowSets, even_pattern, shares
from nemorl_rl.data.rows import RowDataModule, held_out_rows_of, open_data
from nemorl_rl.data.validation_sets import HeldOutRows
from recorded_messages import Raises


def table(name: str, count: int) -> list[dict[str, Any]]:
    return [{"prompt": f"{name}{number}"} for number in range(count)]


def prompts(data: RowDataModule, batches: int) -> list[list[str]]:
    return [[row["prompt"] for row in data.next_batch()] for _ in range(batches)]


def module(sizes: str, weights: list[float], batch: int, *, seed: int = 3, **options: Any) -> RowDataModule:
    """``sizes`` of the parts a, b, … as digits."""
    tables = [table(name, int(size)) for name, size in zip("abc", sizes, strict=False)]
    return RowDataModule(Mixture(tables, weights, **options), batch, seed=seed)


@pytest.mark.parametrize(
    ("weights", "whole"),
    [([1, 1], [1, 1]), ([16, 16], [1, 1]), ([0.7, 0.3], [7, 3]), ([2, 1.5], [4, 3]), ([0.333, 0.667], [333, 667])],
)
def test_weights_are_the_smallest_whole_numbers_of_their_proportions(weights: list[float], whole: list[int]) -> None:
    assert shares(weights) == whole


def test_weights_that_hardly_repeat_are_refused(raises: Raises) -> None:
    with raises(UsageError, "140,432,111"):
        shares([1, 0.123456888])  # 1,000,000,000 : 123,456,888, divided by their common 8: 125,000,000 and 15,432,111


def test_a_period_is_as_even_as_whole_rows_can_be() -> None:
    # Shares of 5, 2, 1 in 8 rows. Behind after row 1: 5/8, 2/8, 1/8 -> a; row 2: 2/8, 4/8, 2/8 -> b; row 3: 7/8, -2/8,
    # 3/8 -> a; row 4: 4/8, 0, 4/8 -> a, the first of equals; row 5: 1/8, 2/8, 5/8 -> c; row 6: 6/8, … -> a; and so on.
    assert even_pattern([5, 2, 1]) == [0, 1, 0, 0, 2, 0, 1, 0]


def test_proportions_are_exact_in_every_period() -> None:
    # 2 : 1 in batches of 6 is 4 and 2 in each, though a has 5 rows and b has 7.
    for batch in prompts(module("57", [2, 1], 6), 20):
        assert Counter(prompt[0] for prompt in batch) == {"a": 4, "b": 2}


def test_a_part_gives_each_of_its_rows_once_before_any_twice() -> None:
    drawn = [prompt for batch in prompts(module("57", [2, 1], 3), 35) for prompt in batch]
    of_a, of_b = ([prompt for prompt in drawn if prompt[0] == part] for part in "ab")
    assert (len(of_a), len(of_b)) == (70, 35)
    for epoch in range(14):
        assert len(set(of_a[5 * epoch : 5 * epoch + 5])) == 5
    for epoch in range(5):
        assert len(set(of_b[7 * epoch : 7 * epoch + 7])) == 7
    assert of_a[:5] != of_a[5:10] or of_a[5:10] != of_a[10:15]


@pytest.mark.parametrize("after", [0, 1, 7, 40])
def test_a_position_of_one_integer_continues_a_mixture(after: int) -> None:
    whole, first, second = (module("572", [5, 2, 1], 3) for _ in range(3))
    prompts(whole, after)
    prompts(first, after)
    state = first.state_dict()
    assert state == {"position": 3 * after, "rows": 14, "seed": 3, "shares": [5, 2, 1]}
    second.load_state_dict(state)
    assert prompts(second, 30) == prompts(whole, 30)


def test_a_checkpoint_of_other_proportions_is_refused(raises: Raises) -> None:
    state = module("57", [2, 1], 3).state_dict()
    with raises(DataError):
        module("57", [1, 1], 3).load_state_dict(state)
    with raises(DataError, "None"):
        RowDataModule(table("a", 12), 3, seed=3).load_state_dict(state)


def test_seeds_of_run_and_mixture_change_the_order_not_the_proportions() -> None:
    one, same = (prompts(module("57", [2, 1], 6), 4) for _ in range(2))
    assert one == same
    for other in (prompts(module("57", [2, 1], 6, seed=4), 4), prompts(module("57", [2, 1], 6, **{"seed": 3}), 4)):
        assert [[p[0] for p in batch] for batch in other] == [[p[0] for p in batch] for batch in one]
    tables = [table("a", 5), table("b", 7)]
    assert prompts(RowDataModule(Mixture(tables, [2, 1], seed=1), 6, seed=3), 4) != one


def test_joined_tables_give_every_row_once_per_epoch() -> None:
    data = RowDataModule(Joined([table("a", 2), table("b", 3)]), 5, seed=1)
    for batch in prompts(data, 3):
        assert sorted(batch) == ["a0", "a1", "b0", "b1", "b2"]


def run_config(**changes: Any) -> Any:
    return nemorl.load_config({"algorithm": "grpo", "model": "org/model", **changes})


def test_rows_per_step_must_be_those_of_a_step(raises: Raises) -> None:
    rows = Mixture([table("a", 5), table("b", 7)], [4, 2], rows_per_step=6)
    data, _ = open_data(rows, None, run_config(), batch_size=6)
    assert Counter(row["prompt"][0] for row in data.next_batch()) == {"a": 4, "b": 2}
    with raises(UsageError, 6, 8):
        open_data(rows, None, run_config(), batch_size=8)


# Several validation sets


def test_each_set_has_metrics_of_its_own_and_all_have_those_of_their_rows() -> None:
    held_out = HeldOutRows({"easy": table("a", 2), "hard": table("b", 6)})
    right = {"a": 1.0, "b": 0.5}
    # 2 rows at 1.0 and 4 of the 6 at 0.5: (2 * 1.0 + 4 * 0.5) / 6
    metrics = held_out.measure(lambda rows: {"accuracy": right[rows[0]["prompt"][0]]}, max_rows=4)
    assert metrics == {"easy/accuracy": 1.0, "hard/accuracy": 0.5, "accuracy": pytest.approx(4 / 6)}


def test_a_metric_that_some_set_lacks_has_no_mean() -> None:
    held_out = HeldOutRows({"one": table("a", 1), "two": table("b", 1)})
    metrics = held_out.measure(lambda rows: {rows[0]["prompt"]: 1.0, "reward": 2.0}, max_rows=4)
    assert metrics == {"one/a0": 1.0, "one/reward": 2.0, "two/b0": 1.0, "two/reward": 2.0, "reward": 2.0}


def test_responses_without_a_verdict_weigh_nothing_in_what_all_sets_have() -> None:
    held_out = HeldOutRows({"easy": table("a", 2), "hard": table("b", 4), "down": table("c", 2)})
    measured = {"a": {"accuracy": 1.0}, "b": {"accuracy": 0.0, "failed_frac": 0.5}, "c": {"failed_frac": 1.0}}
    metrics = held_out.measure(lambda rows: measured[rows[0]["prompt"][0]], max_rows=4)
    # Judged: 2 rows at 1.0 and 2 of 4 at 0.0; not judged: 2 of 4 and both of 2, of 8 rows.
    assert (metrics["accuracy"], metrics["failed_frac"]) == (0.5, 0.5)
    assert metrics["down/failed_frac"] == 1.0
    nothing = HeldOutRows({"down": table("c", 2), "gone": table("c", 1)})
    assert nothing.measure(lambda rows: {"failed_frac": 1.0}, max_rows=4)["failed_frac"] == 1.0


def test_one_set_keeps_the_plain_names() -> None:
    assert HeldOutRows({"": table("a", 3)}).measure(lambda rows: {"n": 1.0 * len(rows)}, max_rows=2) == {"n": 2.0}


def test_sets_are_given_in_python_by_name() -> None:
    given = {"mine": table("a", 2), "sums": {"name": "arithmetic", "num_train": 1, "num_validation": 3}}
    _, held_out = open_data(table("t", 4), given, run_config(), batch_size=2)
    assert held_out is not None
    assert {name: len(rows) for name, rows in held_out.read(256).items()} == {"mine": 2, "sums": 3}


def test_data_to_validate_on_is_used_whole_where_it_has_no_split_for_that() -> None:
    assert held_out_rows_of(table("a", 3)) == table("a", 3)
    rows = held_out_rows_of({"a": table("a", 1), "b": table("b", 2)})
    assert isinstance(rows, RowSets)
    assert [row["prompt"] for row in rows] == ["a0", "b0", "b1"]


def test_no_sets_have_no_rows() -> None:
    assert (len(RowSets({})), list(RowSets({}))) == (0, [])
