"""Widths of rows that are rounded so that they repeat: nothing else about the rows changes, and little is added."""

from __future__ import annotations

import torch
from nemorl_tensors import TokenBatch
from nemorl_tensors.engines.layouts import Layout
from torch import Tensor

PADDED, PACKED, SHARED = (
    Layout(packed=False, min_ratio=None),
    Layout(packed=True, min_ratio=None),
    Layout(packed=False, min_ratio=1.0),
)


def batch_of(*lengths: int, prompt: int = 0) -> TokenBatch:
    """Sequences that begin with the same ``prompt`` tokens, each scored after them."""
    ids = [[7] * prompt + [10 + index] * (length - prompt) for index, length in enumerate(lengths)]
    return TokenBatch.from_sequences(ids, [[False] * prompt + [True] * (length - prompt) for length in lengths])


def widths(layout: Layout, batch: TokenBatch, multiple: int = 1) -> tuple[int, int]:
    """As they are needed, and rounded."""
    plain, rounded = (
        layout.rows(batch, width_multiple=multiple, repeat_widths=rounds).input_ids.shape[1] for rounds in (False, True)
    )
    return plain, rounded


def test_one_long_row_is_rounded_up() -> None:
    assert widths(PACKED, batch_of(300, 302)) == (600, 608)  # 299 + 301: last tokens predict nothing; 19 * 32
    assert widths(SHARED, batch_of(400, 402, prompt=200)) == (600, 608)  # 200 + 199 + 201


def test_other_rows_stay_as_they_are() -> None:
    assert widths(PADDED, batch_of(602, 66)) == (601, 601)
    assert widths(PACKED, batch_of(256, 256)) == (510, 510)  # fewer than 16 * 32: rounding adds a sixteenth at most
    assert widths(PADDED, batch_of(1)) == (0, 0)


def test_the_multiple_that_a_model_needs_is_kept() -> None:
    assert widths(PACKED, batch_of(801, 801), multiple=3) == (1602, 1632)  # 17 * 96
    assert widths(PACKED, batch_of(301, 301), multiple=3) == (600, 600)  # 16 * 96 is more


def test_scored_tokens_are_the_same_ones() -> None:
    for layout, batch in (
        (PADDED, batch_of(70, 66)),
        (PACKED, batch_of(300, 302)),
        (SHARED, batch_of(400, 402, prompt=200)),
    ):
        plain, rounded = (layout.rows(batch, width_multiple=1, repeat_widths=rounds) for rounds in (False, True))

        def read(rows: object) -> Tensor:
            return rows.input_ids.flatten()[rows.predictors]  # type: ignore[attr-defined, no-any-return]

        assert torch.equal(read(plain), read(rounded))
        assert torch.equal(plain.target_ids, rounded.target_ids)
        assert plain.real_tokens == rounded.real_tokens


def test_the_first_batch_says_why_its_tokens_are_not_shared() -> None:
    layout = Layout(packed=False, min_ratio=1.2, remarks=["built so"])
    layout.plan(batch_of(21, 21, prompt=3), budget=100)  # the last tokens predict nothing: 40 for 37
    layout.plan(batch_of(41, 41, prompt=30), budget=100)  # shares; what the first batch was stays said
    built, found = layout.remarks
    assert built == "built so"
    assert found.endswith("the first batch has 1.08 tokens per distinct one, and sharing begins above 1.2")


def test_a_first_batch_that_shares_or_has_nothing_to_share_needs_no_remark() -> None:
    for batch in (batch_of(41, 41, prompt=30), batch_of(20, 20), batch_of(301, 301, prompt=1)):
        layout = Layout(packed=False, min_ratio=1.2)
        layout.plan(batch, budget=100)
        layout.plan(batch_of(21, 21, prompt=3), budget=100)
        assert layout.remarks == ()
