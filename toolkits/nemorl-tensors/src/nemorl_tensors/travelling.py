"""A batch on its way to another process: its tensors as buffers, which Ray copies once into its store.

torch would copy each thrice, and of a view all that it is a view of. Buffers are pickled without a call of Python, and
tuples of plain values beside them: a driver pickles a batch for each of its ranks, several times a step.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Mapping
from typing import Any

import numpy
import torch
from torch import Tensor

_TENSOR = "tensor"
"""Marks the tuple that stands for one."""
_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
"""Of a value's size in bytes, a type that numpy has too."""


def packed(value: Any, protocol: int) -> Any:
    """A tensor, or those of a mapping, as plain data; anything else as it is.

    Args:
        value: Of a field.
        protocol: Of the pickle. Before 5, which has buffers, the bytes are copied.
    """
    if isinstance(value, Mapping):
        return {name: packed(item, protocol) for name, item in value.items()}
    if not isinstance(value, Tensor):
        return value
    array: Any = as_integers(value.cpu().contiguous()).reshape(-1)
    buffer = pickle.PickleBuffer(array) if protocol >= 5 else array.tobytes()
    return _TENSOR, str(value.dtype).removeprefix("torch."), tuple(value.shape), buffer


def unpacked(value: Any) -> Any:
    """What ``packed`` was given. Tensors lie in the buffers' memory, which may be read-only."""
    if isinstance(value, Mapping):
        return {name: unpacked(item) for name, item in value.items()}
    if not isinstance(value, tuple) or value[:1] != (_TENSOR,):
        return value
    _, name, shape, buffer = value
    dtype: torch.dtype = getattr(torch, name)
    if 0 in shape:
        return torch.empty(shape, dtype=dtype)
    with warnings.catch_warnings():  # about Ray's memory, which is read-only: nobody writes to a batch
        warnings.simplefilter("ignore", UserWarning)
        flat = torch.from_numpy(numpy.frombuffer(buffer, numpy.uint8))
    return flat.view(dtype).reshape(shape)


def as_integers(values: Tensor) -> numpy.ndarray[Any, Any]:
    """A tensor on the host as an array of integers of the same size over its memory: numpy lacks some of its types."""
    return values.detach().view(_SAME_SIZE[values.element_size()]).numpy()
