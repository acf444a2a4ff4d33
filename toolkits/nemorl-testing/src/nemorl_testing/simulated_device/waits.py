"""Where the host waits for the simulated device: what ``torch.cuda.set_sync_debug_mode`` warns of on CUDA."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

ALWAYS = frozenset(
    {"_local_scalar_dense", "nonzero", "masked_select", "unique_dim", "_unique2", "unique_consecutive", "equal"}
    | {"bincount", "is_nonzero", "_linalg_check_errors"}
)
"""Operations whose result, or the size of it, the host has to know."""
_counters: list[Counter[str]] = []
_OWN = str(Path(__file__).parent)
_ELSEWHERE = ("/torch/", "/transformers/", "<frozen")


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """How often each line waited within it, as ``folder/file.py:line``: the innermost outside of PyTorch and
    transformers."""
    counter: Counter[str] = Counter()
    _counters.append(counter)
    try:
        yield counter
    finally:
        _counters[:] = [other for other in _counters if other is not counter]  # another may count the same


def wait() -> None:
    """The host waits here."""
    if _counters:
        line = _line()
        for counter in _counters:
            counter[line] += 1


def _line() -> str:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if not path.startswith(_OWN) and not any(part in path for part in _ELSEWHERE):
            return f"{Path(path).parent.name}/{Path(path).name}:{frame.f_lineno}"
        frame = frame.f_back
    return "elsewhere"
