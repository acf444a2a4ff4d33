"""Handles of device memory, as engines on the same machine take them: what torch pickles for its own processes.

Not run: they take GPUs. Whoever opens a handle copies from it while this process holds the tensor. Engines want
pickles; they are written here, and never read.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


def shared_tensors(tensors: Mapping[str, Tensor]) -> str:
    """Names and tensors, pickled by handle, in base64 (SGLang)."""
    return pickled(list(tensors.items()))


def handles(tensors: Mapping[str, Tensor]) -> list[tuple[Any, tuple[Any, ...]]]:
    """For each tensor the function that opens it in another process, and its arguments."""
    from torch.multiprocessing.reductions import reduce_tensor

    return [reduce_tensor(tensor) for tensor in tensors.values()]  # type: ignore[no-untyped-call]


def pickled(content: Any) -> str:
    """In base64."""
    buffer = io.BytesIO()
    ForkingPickler(buffer).dump(content)
    return base64.b64encode(buffer.getvalue()).decode()


def device_name(tensors: Mapping[str, Tensor]) -> str:
    """The number of the GPU, by which engines look for handles."""
    import torch

    tensor = next(iter(tensors.values()))
    return str(torch.cuda.get_device_properties(tensor.device).uuid)
