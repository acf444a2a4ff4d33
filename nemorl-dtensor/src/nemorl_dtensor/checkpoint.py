"""A training checkpoint: PyTorch's distributed checkpoint over safetensors files, and JSON. No pickle, so reading one
runs no code.

``model/`` (trainable parameters, biases of routers), ``optimizer/`` and ``optimizer.json`` (moments and float32
masters, the number of steps), ``rng-<rank>.safetensors`` (torch generators). Every rank writes its own shards, and a
file says in its header which part of which tensor it holds; so one rank reads what two have written, and the other way
round.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from nemorl.contracts import AdapterShape
from nemorl.errors import CheckpointError
from nemorl_tensors.engines.checkpoint_files import RankFiles, TensorFile, random_state, restore_random_state
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load as load_distributed

from nemorl_dtensor.checkpoint_plan import planned_files

if TYPE_CHECKING:
    from nemorl_dtensor.optim import Optimizer

MODEL, OPTIMIZER, OPTIMIZER_JSON = "model", "optimizer", "optimizer.json"
FORMAT = 2


def contents(
    parameters: Mapping[str, nn.Parameter],
    optimizer: Optimizer,
    rank: int = 0,
    *,
    with_optimizer: bool = True,
    adapter: AdapterShape | None = None,
    buffers: Mapping[str, Tensor] | None = None,
) -> RankFiles:
    """This rank's files of everything that makes the next step, over the live tensors. Collective.

    Args:
        parameters: What is trained, by name.
        optimizer: Of these.
        rank: Of this process.
        with_optimizer: Also the optimizer's moments and float32 masters, not its position alone.
        adapter: What the parameters are scaled and published as, where they are those of an adapter.
        buffers: What else training moves: the biases of routers; the same on every rank.
    """
    weights = planned_files({name: parameter.detach() for name, parameter in parameters.items()} | dict(buffers or {}))
    states = planned_files(optimizer.tensors()) if with_optimizer else {}
    position = {
        "format": FORMAT,
        "steps": optimizer.steps,
        "has_state": bool(states),  # none either where no step so far had a gradient
        "rate_scale": optimizer.rate_scale,
        "adapter": None if adapter is None else {**asdict(adapter), "modules": sorted(adapter.modules)},
    }
    return RankFiles(
        {f"{MODEL}/{name}": file for name, file in weights.items()}
        | {f"{OPTIMIZER}/{name}": file for name, file in states.items()}
        | {_rng_name(rank): TensorFile(random_state())},
        {OPTIMIZER_JSON: json.dumps(position, indent=2) + "\n"} if rank == 0 else {},
    )


def load(
    path: Path,
    parameters: Mapping[str, nn.Parameter],
    optimizer: Optimizer,
    rank: int = 0,
    *,
    buffers: Mapping[str, Tensor] | None = None,
) -> AdapterShape | None:
    """Restore what :func:`contents` saved, into the memory that the parameters already have. Collective.

    The number of ranks and how they share the model may differ from when it was written; then random generators beyond
    those saved start from rank 0's. A buffer that was not saved stays as it is.

    Returns:
        Of the adapter whose state was saved; ``None`` where there was none, or a version before this one saved it.

    Raises:
        CheckpointError: Files are missing or damaged, or are of another model.
    """
    found = _shapes(path / MODEL)
    weights = {name: parameter.detach() for name, parameter in parameters.items()}
    weights |= {name: buffer for name, buffer in (buffers or {}).items() if name in found}
    _compare(path, {name: tensor.shape for name, tensor in weights.items()}, found)
    _read(path / MODEL, weights)
    position = _Position.read(path / OPTIMIZER_JSON)
    steps, optimizer.rate_scale = position.steps, position.rate_scale
    if position.has_state:
        # Before the first step there may be nothing to save: no moments, and no masters in float32.
        has_files = steps > 0 or any((path / OPTIMIZER).glob("*"))
        state = optimizer.allocate(_shapes(path / OPTIMIZER).keys() if has_files else (), steps)
        if state:
            _read(path / OPTIMIZER, state)
    else:
        optimizer.restart(steps)
    file = path / _rng_name(rank)
    restore_random_state(_load_file(file if file.is_file() else path / _rng_name(0)))
    return position.adapter


def _read(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Fill ``tensors``, which may be shards, from the files of ``folder``."""
    with _damage_named(folder), _quiet():
        reader = HuggingFaceStorageReader(path=str(folder))
        load_distributed(tensors, storage_reader=reader, no_dist=not dist.is_initialized())


def _shapes(folder: Path) -> dict[str, torch.Size]:
    """Every tensor that the files of ``folder`` hold together, and its whole shape."""
    if not any(folder.glob("*.safetensors")):
        raise CheckpointError(f"{folder} is missing", fix="resume from a complete checkpoint")
    with _damage_named(folder):
        found = HuggingFaceStorageReader(path=str(folder)).read_metadata().state_dict_metadata
    return {name: getattr(entry, "size", torch.Size()) for name, entry in found.items()}


def _load_file(file: Path) -> dict[str, Tensor]:
    if not file.is_file():
        raise CheckpointError(f"{file} is missing", fix="resume from a complete checkpoint")
    with _damage_named(file):
        return load_file(file)


@contextmanager
def _damage_named(path: Path) -> Iterator[None]:
    # torch reports a rank's failure as a BaseException; safetensors has an error type of its own.
    try:
        yield
    except (CheckpointException, Exception) as error:
        raise CheckpointError(f"{path} cannot be read: {error}", fix="resume from an earlier checkpoint") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Without torch's remark that one process loads alone, which is what was asked for."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*the intent is to load in a single process.*")
        yield


def _rng_name(rank: int) -> str:
    return f"rng-{rank}.safetensors"


@dataclass(frozen=True)
class _Position:
    """What ``optimizer.json`` says."""

    steps: int
    """Before the checkpoint"""
    has_state: bool
    """The optimizer's state was saved"""
    rate_scale: float
    adapter: AdapterShape | None

    @classmethod
    def read(cls, file: Path) -> _Position:
        """
        Raises:
            CheckpointError: It is missing, damaged, or of another version.
        """
        try:
            state = json.loads(file.read_text())
            if state["format"] != FORMAT:
                raise CheckpointError(
                    f"{file} has format {state['format']}, expected {FORMAT}", fix="use the version that wrote it"
                )
            shape = state.get("adapter")
            return cls(
                int(state["steps"]),
                bool(state.get("has_state", True)),
                float(state.get("rate_scale", 1.0)),
                None if shape is None else AdapterShape(**{**shape, "modules": frozenset(shape["modules"])}),
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{file} cannot be read: {error}", fix="resume from an earlier checkpoint") from error


def _compare(path: Path, expected: Mapping[str, torch.Size], found: Mapping[str, torch.Size]) -> None:
    wrong = [f"{name} is missing" for name in expected if name not in found]
    wrong += [f"{name} is unknown" for name in found if name not in expected]
    wrong += [
        f"{name} has shape {tuple(found[name])}, the model {tuple(shape)}"
        for name, shape in expected.items()
        if name in found and found[name] != shape
    ]
    if wrong:
        listed = "; ".join(wrong[:5]) + (f"; and {len(wrong) - 5} more" if len(wrong) > 5 else "")
        raise CheckpointError(
            f"the checkpoint {path} is of another model: {listed}",
            fix="resume with the model and lora settings it was saved with",
        )
