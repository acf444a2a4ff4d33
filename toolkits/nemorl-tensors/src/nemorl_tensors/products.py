"""Matrix products of linear layers and output heads, by the faster of torch's two libraries.

# N = rows (tokens), I = inputs, O = outputs

On a CPU, torch sends float32 products to MKL, which uses half-width vectors on processors that are not Intel's; oneDNN,
which torch ships too, uses the full width everywhere. Results are float32 in both and differ by rounding only.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

MIN_WORK = 1 << 20
"""N * I * O from which oneDNN is used. A call of it costs 12 us, one of MKL 2 us.

Measured us on an AMD EPYC with AVX-512, MKL / oneDNN: [16, 128] x [128, 384] (0.8 M) 21 / 22, 32 rows (1.6 M) 36 / 29;
[4, 576] x [576, 576] (1.3 M) 57 / 56, 8 rows 84 / 66, 32 rows 250 / 143. Not measured where MKL has full-width vectors:
if the two are equally fast there, the longer call costs at most 10 us a product.
"""
MIN_ROWS = 4
"""Fewer rows are as fast with MKL, because reading the weights takes longer than the arithmetic …"""
LARGE_WORK = 1 << 24
"""… unless the weights are as large as an output head: of [1, 576] x [576, 49152] 6.9 ms / 5.1 ms, of 2 rows 18 / 7."""


def _onednn(name: str) -> Any:
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return None
    return getattr(torch.ops.mkldnn, name, None)


_ONEDNN, _REORDER = _onednn("_linear_pointwise"), _onednn("_reorder_linear_weight")


def uses_onednn(rows: Tensor, weight: Tensor) -> bool:
    """Whether :func:`product` of these, [N, I] and [O, I], is oneDNN's."""
    if _ONEDNN is None or not rows.is_cpu or rows.dtype != torch.float32 or weight.dtype != torch.float32:
        return False
    count = rows.shape[0]
    work = count * weight.numel()
    return work >= LARGE_WORK or (count >= MIN_ROWS and work >= MIN_WORK)


def product(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """[N, O] = rows [N, I] @ weight [O, I].T + bias [O]; either matrix may be a transposed view. Without gradient.

    Columns cut out of a wider matrix should be copied first: oneDNN takes 35 ms for 128 rows, 32 inputs and 400 outputs
    of such a ``weight``, and 0.1 ms for a whole one.

    ``weight`` may be what :func:`packed` returned.

    Example:
        >>> product(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0]])).item()  # 1 * 3 + 2 * 4
        11.0
    """
    if weight.is_mkldnn or uses_onednn(rows, weight):
        result: Tensor = _ONEDNN(rows, weight, bias, "none", [], "")
        return result
    return functional.linear(rows, weight, bias)


def packs(weight: Tensor) -> bool:
    """Whether :func:`packed` has a copy of this matrix that products are faster with."""
    if _REORDER is None or not weight.is_cpu or weight.is_mkldnn:
        return False
    return weight.dtype == torch.float32 or (weight.dtype == torch.bfloat16 and _has_bfloat16())


def packed(weight: Tensor, rows: int) -> Tensor:
    """A copy of ``weight`` [O, I] in the order in which oneDNN reads it, for :func:`product` with about so many rows.

    Without it, a product of few rows puts the weight in order each time. All products of a bfloat16 decoding step of
    SmolLM2-135M (AMD EPYC) take 21, 24 and 41 ms with 1, 8 and 32 rows, and 14, 18 and 34 ms with it; making the copies
    takes 134 ms. Only where :func:`packs` says so.
    """
    result: Tensor = _REORDER(weight, rows)
    return result


@cache
def _has_bfloat16() -> bool:
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
