"""The protobuf messages of the Tinker API, which the client's own wheel describes, and tensors in them.

A tensor is dense bytes, or the listed entries of a matrix in compressed rows (CSR).
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from nemorl.errors import DataError, UsageError
from torch import Tensor

KINDS = {1: np.float32, 2: np.int64, 3: np.int32}
"""NumPy's types by the number of ``DType``; bfloat16 (4) is no type of NumPy's."""
BFLOAT16 = 4
MOST_ENTRIES = 1 << 28
"""Of one tensor: a sparse one may name a shape that its bytes would not."""


def require_messages() -> None:
    """Refuse to start a server that could not read its clients.

    Raises:
        UsageError: The wheel is not installed.
    """
    found = find_spec("tinker")
    if found is None or found.origin is None:  # a folder of that name is no package
        raise UsageError(
            "the package tinker is not installed, whose messages a Tinker server speaks",
            fix="pip install 'nemorl-agents[tinker]'",
        )


def messages() -> Any:
    """The module of messages: ``ForwardBackwardRequest``, ``ForwardBackwardOutput``, ``SampleResponse``, …"""
    require_messages()
    from tinker.proto import tinker_public_pb2  # type: ignore[import-not-found, import-untyped, unused-ignore]

    return tinker_public_pb2


def tensor_of(message: Any, name: str) -> Tensor:
    """A ``Tensor`` message as a dense tensor, int64 or float32. Entries that a sparse one does not list are 0.

    Args:
        message: Of the client.
        name: Of the field, for errors.

    Raises:
        DataError: Its parts do not fit together.
    """
    shape = tuple(message.shape)
    if any(size < 0 for size in shape) or int(np.prod(shape, dtype=object)) > MOST_ENTRIES:
        raise DataError(f"{name}: a tensor of shape {list(shape)} is not taken", fix="send smaller batches")
    if message.HasField("sparse_csr"):
        return _densified(message, shape, name)
    values = _values(message.dense, message.dtype, name)
    if not shape:
        return values
    if values.numel() != int(np.prod(shape)):
        raise DataError(f"{name}: {values.numel()} values do not fill shape {list(shape)}")
    return values.reshape(shape)


def _values(raw: bytes, kind: int, name: str) -> Tensor:
    if kind == BFLOAT16:
        halves = np.frombuffer(raw, dtype=np.uint16).astype(np.uint32) << 16
        return torch.from_numpy(halves.view(np.float32).copy())
    if kind not in KINDS:
        raise DataError(f"{name}: type {kind} is unknown", fix="send float32 or int64")
    if len(raw) % np.dtype(KINDS[kind]).itemsize:
        raise DataError(f"{name}: {len(raw)} bytes are no whole number of {np.dtype(KINDS[kind]).name}")
    array = np.frombuffer(raw, dtype=KINDS[kind])
    return torch.from_numpy(array.astype(np.int64 if array.dtype.kind == "i" else np.float32))


def _densified(message: Any, shape: tuple[int, ...], name: str) -> Tensor:
    csr = message.sparse_csr
    values = _values(csr.values, message.dtype, name)
    starts, columns = (_values(part, 2, name) for part in (csr.crow_indices, csr.col_indices))
    if len(shape) != 2 or len(starts) != shape[0] + 1 or len(columns) != len(values):
        raise DataError(f"{name}: the rows of a sparse tensor do not fit its shape {list(shape)}")
    counts = starts.diff()
    fits = int(starts[0]) == 0 and int(starts[-1]) == len(values) and bool((counts >= 0).all())
    if not fits or (len(columns) and not bool(((columns >= 0) & (columns < shape[1])).all())):
        raise DataError(f"{name}: the indices of a sparse tensor leave its shape {list(shape)}")
    dense = torch.zeros(shape, dtype=values.dtype)
    dense[torch.arange(shape[0]).repeat_interleave(counts), columns] = values
    return dense
