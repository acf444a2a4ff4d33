"""What matrix products cost here: figures of a benchmark mean little beside another machine's without it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

SIZE = 1024
"""Of square matrices: large enough for full speed, small enough for the cache."""
REPEATS = 7


def cpu_model() -> str:
    """The processor's name, and which of the instructions that matter it has."""
    try:
        with open("/proc/cpuinfo") as file:
            lines = dict(line.partition(":")[::2] for line in file if line.strip())
    except OSError:
        return "unknown processor"
    facts = {name.strip(): value.strip() for name, value in lines.items()}
    flags = facts.get("flags", "").split()
    has = [name for name in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if name in flags]
    return f"{facts.get('model name', 'unknown processor')} ({', '.join(has) or 'no AVX2'})"


def matrix_speeds() -> dict[str, float]:
    """GFLOP per CPU second of products of random matrices: float32 by torch's BLAS (MKL in builds for x86) and by
    oneDNN, bfloat16 by oneDNN."""
    import torch

    single, other = (torch.randn(SIZE, SIZE) for _ in range(2))
    half, other_half = single.bfloat16(), other.bfloat16()
    blas = "MKL" if torch.backends.mkl.is_available() else "BLAS"  # type: ignore[no-untyped-call]
    found = {f"{blas} float32": _speed(lambda: single @ other)}
    if hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        product = torch.ops.mkldnn._linear_pointwise
        found["oneDNN float32"] = _speed(lambda: product(single, other, None, "none", [], ""))
    return {**found, "oneDNN bfloat16": _speed(lambda: half @ other_half)}


def matrices_line(speeds: dict[str, float]) -> str:
    """One line for people."""
    return "GFLOP per CPU second: " + ", ".join(f"{name} {speed:.0f}" for name, speed in speeds.items())


def _speed(work: Callable[[], Any]) -> float:
    """The fastest of some: other jobs only ever slow one down."""
    work()
    times = []
    for _ in range(REPEATS):
        start_s = time.process_time()
        work()
        times.append(time.process_time() - start_s)
    return round(2 * SIZE**3 / min(times) / 1e9, 1)
