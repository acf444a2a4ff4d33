"""Both of torch's libraries compute the product, and each is asked where it is the faster one."""

from __future__ import annotations

import pytest
import torch
from nemorl_tensors.products import packed, packs, product, uses_onednn

has_onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN")


@has_onednn
@pytest.mark.parametrize(
    ("rows", "inputs", "outputs", "expected"),
    [
        (1, 64, 64, False),
        (3, 1024, 1024, False),  # few rows
        (4, 512, 512, True),  # 2^20
        (4, 512, 511, False),
        (1, 576, 49152, True),  # an output head
    ],
)
def test_onednn_is_asked_for_large_products(rows: int, inputs: int, outputs: int, expected: bool) -> None:
    assert uses_onednn(torch.empty(rows, inputs), torch.empty(outputs, inputs)) is expected


@has_onednn
def test_onednn_serves_float32_alone() -> None:
    rows, weight = torch.empty(64, 512), torch.empty(512, 512)
    assert uses_onednn(rows, weight)
    assert not uses_onednn(rows.bfloat16(), weight.bfloat16())


@pytest.mark.parametrize("rows", [2, 300])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_product_is_that_of_float64(rows: int, transposed: bool) -> None:
    draw = torch.Generator().manual_seed(0)
    x, weight = torch.randn(rows, 96, generator=draw), torch.randn(64, 96, generator=draw)
    bias = torch.randn(64, generator=draw)
    if transposed:
        x, weight = x.t().contiguous().t(), weight.t().contiguous().t()
    expected = x.double() @ weight.double().t() + bias
    torch.testing.assert_close(product(x, weight, bias).double(), expected, rtol=1e-5, atol=1e-5)


@has_onednn
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 32, 300])
def test_a_product_with_a_packed_copy_is_that_of_float64(rows: int, dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(*size, generator=draw).to(dtype) for size in ((rows, 96), (64, 96), (64,)))
    if not packs(weight):
        pytest.skip(f"oneDNN has no {dtype} on this processor")
    expected = x.double() @ weight.double().t() + bias
    copy = packed(weight, 32)
    assert not packs(copy)
    close = 1e-5 if dtype == torch.float32 else 2**-7  # bfloat16 rounds by 2^-9 of its value
    torch.testing.assert_close(product(x, copy, bias).double(), expected, rtol=close, atol=close)
    weight.zero_()
    assert product(x, copy, bias).any(), "it is a copy"


def test_other_precisions_are_not_packed() -> None:
    assert not packs(torch.empty(4, 4, dtype=torch.float64))
    assert not packs(torch.empty(4, 4, device="meta"))
