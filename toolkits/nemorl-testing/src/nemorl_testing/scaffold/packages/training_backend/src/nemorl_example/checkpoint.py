"""A training checkpoint: two files without pickle, so that reading one runs no code."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from nemorl.errors import CheckpointError
from nemorl_tensors.engines.checkpoint_files import random_state, restore_random_state
from safetensors.torch import load_file, save_file
from torch import Tensor

TENSORS, STATE = "training.safetensors", "training.json"
MOMENTS = ("step", "exp_avg", "exp_avg_sq")
"""What AdamW keeps of each parameter."""


def save(path: Path, parameters: Mapping[str, Tensor], optimizer: torch.optim.AdamW | None, steps: int) -> None:
    """Write everything that makes the next step into the existing folder ``path``, without moments where there is no
    ``optimizer``: then :func:`load` finds none, and they begin anew."""
    tensors = {f"rng.{device}": state for device, state in random_state().items()}
    for name, parameter in parameters.items():
        tensors[f"model.{name}"] = parameter.detach()
        state = optimizer.state.get(parameter, {}) if optimizer is not None else {}
        tensors |= {f"{moment}.{name}": value for moment, value in state.items()}
    save_file(tensors, path / TENSORS)
    (path / STATE).write_text(json.dumps({"steps": steps}) + "\n")


def load(path: Path, parameters: Mapping[str, Tensor], optimizer: torch.optim.AdamW) -> int:
    """Restore what :func:`save` wrote; the number of steps done.

    Raises:
        CheckpointError: files are missing or damaged, or are of another model.
    """
    try:
        tensors = load_file(path / TENSORS)
        steps = int(json.loads((path / STATE).read_text())["steps"])
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(tensors[f"model.{name}"])
    except Exception as error:  # safetensors has error types of its own
        raise CheckpointError(
            f"{path} cannot be read: {type(error).__name__}: {error}",
            fix="resume with the model it was saved with, or from an earlier checkpoint",
        ) from error
    optimizer.state.clear()
    for name, parameter in parameters.items():
        if f"exp_avg.{name}" in tensors:
            # Copies: memory that is mapped from a file is aligned otherwise, and kernels may then round otherwise.
            moments = {moment: tensors[f"{moment}.{name}"].clone() for moment in MOMENTS}
            device = parameter.device
            optimizer.state[parameter] = {m: t if m == "step" else t.to(device) for m, t in moments.items()}
    restore_random_state(
        {name.removeprefix("rng."): state for name, state in tensors.items() if name.startswith("rng.")}
    )
    return steps
