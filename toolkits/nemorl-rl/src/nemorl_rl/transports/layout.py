"""How tensors lie in a run of bytes: what every transport that crosses a process boundary has in common.

A tensor crosses as bytes with its dtype and shape beside it, so every dtype travels, bfloat16 included.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import numpy
    from torch import Tensor

ALIGNMENT = 64
"""Bytes at which each tensor starts: a cache line."""


class Slot(NamedTuple):
    """Where a tensor lies in a run of bytes, and what it is. A tuple, for thousands are pickled with each version."""

    dtype: str
    """``bfloat16``, ``float32``, … as torch names it."""
    shape: tuple[int, ...]
    offset: int
    """Bytes from the start."""

    def view(self, memory: Any) -> Tensor:
        """The tensor, without a copy."""
        import torch

        dtype = getattr(torch, self.dtype)
        count = int(torch.Size(self.shape).numel())
        if count == 0:
            return torch.empty(self.shape, dtype=dtype)
        return torch.frombuffer(memory, dtype=dtype, count=count, offset=self.offset).view(self.shape)

    def part_of(self, flat: Tensor) -> Tensor:
        """The same out of a uint8 tensor [bytes], on whatever device it is."""
        import torch

        dtype = getattr(torch, self.dtype)
        size = int(torch.Size(self.shape).numel()) * dtype.itemsize
        return flat[self.offset : self.offset + size].view(dtype).view(self.shape)


Slots = Mapping[str, Slot]
"""Where each tensor of a bucket lies, by its Hugging Face name."""


def slot_of(tensor: Tensor, offset: int = 0) -> Slot:
    """The slot that a tensor takes at an offset."""
    return Slot(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), offset)


def aligned(offset: int) -> int:
    """The next offset at which a tensor may start."""
    return -(-offset // ALIGNMENT) * ALIGNMENT


def bytes_of(tensor: Tensor) -> numpy.ndarray[Any, Any]:
    """The tensor's memory as uint8, on the CPU."""
    import torch

    flat = tensor.detach().cpu().contiguous().reshape(-1)
    array: numpy.ndarray[Any, Any] = flat.view(torch.uint8).numpy()
    return array


def pack(bucket: Mapping[str, Tensor]) -> tuple[Tensor, Slots]:
    """A bucket as one uint8 tensor [bytes] on the device of its tensors, a copy; and where each tensor lies in it."""
    import torch

    slots: dict[str, Slot] = {}
    end = 0
    for name, tensor in bucket.items():
        slots[name] = slot_of(tensor, aligned(end))
        end = slots[name].offset + tensor.nbytes
    device = next((tensor.device for tensor in bucket.values()), torch.device("cpu"))
    flat = torch.empty(max(end, 1), dtype=torch.uint8, device=device)
    for name, tensor in bucket.items():
        slots[name].part_of(flat).copy_(tensor.detach())
    return flat, slots


def unpack(flat: Tensor, slots: Slots) -> dict[str, Tensor]:
    """The tensors of a packed bucket, as views of it."""
    return {name: slot.part_of(flat) for name, slot in slots.items()}
