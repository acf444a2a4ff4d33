"""Reference log-probs that are computed once: the table, and the look ahead that fills it."""

from __future__ import annotations

from pathlib import Path

import torch
from nemorl.errors import DataError
from nemorl_preference.reference_table import ReferenceTable
from nemorl_preference.references import look_ahead
from nemorl_rl.data.rows import RowDataModule
from nemorl_tensors import TokenBatch, pair_batch
from recorded_messages import Raises

NAN = float("nan")
A, B, C = ([9, 1, 2], [False, True, True]), ([9, 3], [False, True]), ([9, 1, 2], [False, False, True])
"""C has the tokens of A, of which it counts fewer."""
SUMS = {"A": -3.0, "B": -4.0, "C": -2.0}


def batch() -> TokenBatch:
    return pair_batch([A, B], [B, C])


def filled(path: Path) -> ReferenceTable:
    table = ReferenceTable(path)
    asked = batch().select(table.missing(batch()))
    table.add(asked, torch.where(asked.mask, torch.tensor([NAN, -1.0, -2.0, NAN, -4.0, NAN, NAN, -2.0]), NAN))
    return table


def test_each_response_is_asked_for_once(tmp_path: Path) -> None:
    table = ReferenceTable(tmp_path / "table")
    assert table.missing(batch()) == [0, 2, 3]  # A, the last B, C
    assert filled(tmp_path / "table").missing(batch()) == []


def test_a_saved_table_answers_as_before(tmp_path: Path) -> None:
    path = tmp_path / "reference.safetensors"
    table = filled(path)
    table.save()
    for known in (table, ReferenceTable(path)):
        assert len(known) == 3
        assert known.lookup(batch()).tolist() == [SUMS["A"], SUMS["B"], SUMS["B"], SUMS["C"]]
    assert [file.name for file in tmp_path.iterdir()] == ["reference.safetensors"]


def test_an_unknown_response_is_an_error(tmp_path: Path, raises: Raises) -> None:
    with raises(DataError):
        ReferenceTable(tmp_path / "table").lookup(batch())


def test_looking_ahead_sees_what_the_run_will_see_and_leaves_the_data_alone() -> None:
    rows = [{"prompt": str(number)} for number in range(10)]
    data = RowDataModule(rows, 4, seed=1)
    few = [row["prompt"] for found in look_ahead(data, 2) for row in found]
    all_of_them = {row["prompt"] for found in look_ahead(data, 100) for row in found}
    assert few == [row["prompt"] for _ in range(2) for row in data.next_batch()]
    assert all_of_them == {row["prompt"] for row in rows}
