"""torch's global random generators as tensors, for checkpoints."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


def random_state() -> dict[str, Tensor]:
    """The state of each generator of this process, by device: ``cpu``, ``cuda.0``, …"""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states |= {f"cuda.{index}": state for index, state in enumerate(torch.cuda.get_rng_state_all())}
    return states


def restore_random_state(states: Mapping[str, Tensor]) -> None:
    """Set the generators to what :func:`random_state` gave. Devices that are not here are passed over."""
    torch.set_rng_state(states["cpu"].clone())
    for name, state in states.items():
        index = name.removeprefix("cuda.")
        if index.isdecimal() and int(index) < torch.cuda.device_count():
            torch.cuda.set_rng_state(state.clone(), int(index))
