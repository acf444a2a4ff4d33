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


def test_wide_rows_are_rounded_up() -> None:
    assert widths(PADDED, batch_of(70, 66)) == (69, 72)  # a last token predicts nothing: 69, to a multiple of 4
    assert widths(PACKED, batch_of(300, 302)) == (600, 608)  # 19 * 32
    assert widths(SHARED, batch_of(400, 402, prompt=200)) == (600, 608)  # 200 + 199 + 201


def test_narrow_rows_stay_as_they_are() -> None:
    """16 multiples at least, or rounding could add more than a sixteenth."""
    assert widths(PADDED, batch_of(64, 10)) == (63, 63)
    assert widths(PACKED, batch_of(256, 256)) == (510, 510)
    assert widths(PADDED, batch_of(1)) == (0, 0)


def test_the_multiple_that_a_model_needs_is_kept() -> None:
    assert widths(PADDED, batch_of(200, 66), multiple=3) == (201, 204)  # 12
    assert widths(PADDED, batch_of(101, 66), multiple=3) == (102, 102)  # 16 * 12 is more than 100


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
