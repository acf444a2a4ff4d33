"""The matrix speed of a device: what utilisation is measured against. Importing this imports no torch.

Of known GPUs it is the dense figure of NVIDIA's data sheets (``devices``), as in NeMo RL. Of others, and of CPUs, whose
clock, vector width and number of cores no name tells, it is what matrix products reach here, alone, at the time the
model is built.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import cache
from typing import TYPE_CHECKING

from nemorl_rl.planning.devices import Speed, named_by_driver

if TYPE_CHECKING:
    from torch import Tensor, dtype

TERA = 1e12
SIZES = (256, 512, 512, 512, 512, 1024, 1024, 1024)
"""Sides of the matrices that are multiplied: the small ones warm up and fit between the turns of others."""
BUDGET_S = 0.03
"""No further product is begun after so much time."""


def device_peak(device: str, kind: dtype) -> float:
    """FLOP/s of matrix products on one device: of the table, else measured once per process.

    Args:
        device: torch device string, ``cpu`` or ``cuda:0``.
        kind: Number format of the products.
    """
    import torch

    if device.startswith("cuda"):
        known = named_by_driver(torch.cuda.get_device_name(device))
        if known is not None:
            return TERA * _of_format(known.speed, kind)
    return _measured(device, kind, torch.get_num_threads())


def _of_format(peak: Speed, kind: dtype) -> float:
    import torch

    if kind in (torch.bfloat16, torch.float16):
        return peak.bfloat16
    return peak.tf32 if torch.backends.cuda.matmul.fp32_precision == "tf32" else peak.float32


@cache
def _measured(device: str, kind: dtype, threads: int) -> float:
    """The best of a few products of square matrices, with every library that training may use."""
    import torch

    with torch.inference_mode():
        return max(_speed(product, device, kind) for product in _products(device, kind))


def _products(device: str, kind: dtype) -> Iterator[Callable[[Tensor, Tensor], Tensor]]:
    import torch

    yield torch.mm
    has_onednn = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if has_onednn and device == "cpu" and kind == torch.float32:
        # torch.mm is MKL's, which is slower than oneDNN on some processors: layers are computed by the latter.
        yield lambda left, right: torch.ops.mkldnn._linear_pointwise(left, right, None, "none", [], "")


def _speed(product: Callable[[Tensor, Tensor], Tensor], device: str, kind: dtype) -> float:
    import torch

    best, began_s = 0.0, time.perf_counter()
    for size in SIZES:
        matrix = torch.ones(size, size, device=device, dtype=kind)
        _wait(device)
        started_s = time.perf_counter()
        product(matrix, matrix)
        _wait(device)
        ended_s = time.perf_counter()
        best = max(best, 2 * size**3 / (ended_s - started_s))
        if ended_s - began_s > BUDGET_S:
            break
    return best


def _wait(device: str) -> None:
    import torch

    if device != "cpu":
        torch.accelerator.synchronize(device)
