"""What PyTorch's accelerators have in common, for code that means none of them in particular.

CUDA, ROCm, Intel's XPU and Apple's MPS are asked by ``torch.accelerator`` and ``torch.get_device_module``.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

Record = TypeVar("Record")
WITHOUT_STREAMS = frozenset({"cpu", "mps", "meta"})
"""Device types whose copies the host always waits for, and that read any memory of the host equally well."""


def has_streams(device: torch.device | str) -> bool:
    """Whether work and copies of the device may go on side by side. Copies then want page-locked memory."""
    return torch.device(device).type not in WITHOUT_STREAMS


def streams_of(device: torch.device | str) -> Any:
    """``torch.cuda`` for CUDA, and its like: ``Stream``, ``current_stream`` and ``stream``."""
    return torch.get_device_module(torch.device(device))


def moved(tensor: Tensor, device: torch.device | str) -> Tensor:
    """The tensor on a device. The host waits for copies to itself alone: others are in order with what uses them."""
    return tensor.to(device, non_blocking=has_streams(device))


def on_device(record: Record, device: torch.device | str) -> Record:
    """A dataclass with those of its fields that are tensors on a device."""
    values = {item.name: getattr(record, item.name) for item in fields(record)}  # type: ignore[arg-type]
    here = {name: moved(value, device) for name, value in values.items() if isinstance(value, Tensor)}
    return replace(record, **here)  # type: ignore[type-var]


def empty_cache() -> None:
    """Give memory back that is kept for later, so that other processes may have it. Nothing to do on the CPU."""
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()
