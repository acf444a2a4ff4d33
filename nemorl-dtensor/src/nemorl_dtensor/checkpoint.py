"""A training checkpoint as safetensors and JSON: no pickle, so reading one runs no code.

``model.safetensors`` (trainable parameters), ``optimizer.safetensors`` and ``optimizer.json`` (AdamW state, schedule
position), ``rng.safetensors`` (torch generators). Also here: a policy as a Hugging Face folder.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from nemorl.errors import BackendError, CheckpointError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from nemorl_dtensor.optim import Optimizer

MODEL, OPTIMIZER, OPTIMIZER_JSON, RNG = (
    "model.safetensors",
    "optimizer.safetensors",
    "optimizer.json",
    "rng.safetensors",
)
FORMAT = 1
TOKENIZER_FILES = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt", "*.model", "chat_template*",
    "generation_config.json",
)  # fmt: skip
"""Copied rather than loaded and saved again: loading may guess another tokenizer class."""


def save(path: Path, parameters: Mapping[str, nn.Parameter], optimizer: Optimizer | None) -> None:
    """Write everything that makes the next step into the existing folder ``path``."""
    _write(path / MODEL, {name: parameter.detach() for name, parameter in parameters.items()})
    _write(path / RNG, _rng_states())
    if optimizer is not None:
        _write(path / OPTIMIZER, optimizer.tensors())
        (path / OPTIMIZER_JSON).write_text(json.dumps({"format": FORMAT, "steps": optimizer.steps}, indent=2) + "\n")


@torch.no_grad()
def load(path: Path, parameters: Mapping[str, nn.Parameter], optimizer: Optimizer | None) -> None:
    """Restore what :func:`save` wrote, into the memory that the parameters already have.

    Raises:
        CheckpointError: Files are missing or damaged, or are of another model.
    """
    weights = _read(path / MODEL)
    _compare(path, {name: parameter.shape for name, parameter in parameters.items()}, weights)
    for name, parameter in parameters.items():
        parameter.copy_(weights[name])
    if optimizer is not None:
        optimizer.load_tensors(_read(path / OPTIMIZER), _steps(path / OPTIMIZER_JSON))
    _restore_rng(_read(path / RNG))


def save_pretrained(
    path: Path, model: PreTrainedModel, tensors: Iterable[tuple[str, Tensor]] | None, source: Path | str
) -> None:
    """Write ``model`` as a Hugging Face folder with the tokenizer of ``source``.

    Args:
        path: Created if needed.
        model: The policy.
        tensors: Its weights under Hugging Face names where they differ from its own (merged adapters).
        source: Folder or Hugging Face name that the policy was loaded from.
    """
    path.mkdir(parents=True, exist_ok=True)
    if tensors is not None:
        with torch.device("meta"):
            plain = type(model)(model.config)
        plain.load_state_dict(dict(tensors), assign=True)
        plain.tie_weights()
        plain.generation_config = model.generation_config
        model = plain
    model.save_pretrained(path)
    if isinstance(source, Path):
        for pattern in TOKENIZER_FILES:
            for file in source.glob(pattern):
                shutil.copyfile(file, path / file.name)
        return
    from transformers import AutoTokenizer

    try:
        AutoTokenizer.from_pretrained(source).save_pretrained(path)
    except (OSError, ValueError) as error:
        raise BackendError(
            f"the weights were written to {path}, but the tokenizer of {source!r} cannot be loaded: {error}",
            fix="copy the tokenizer files into the folder yourself",
        ) from error


def _write(file: Path, tensors: Mapping[str, Tensor]) -> None:
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, file)


def _read(file: Path) -> dict[str, Tensor]:
    if not file.is_file():
        raise CheckpointError(f"{file} is missing", fix="resume from a complete checkpoint")
    try:
        return load_file(file)
    except Exception as error:  # safetensors raises its own type, which derives from Exception only
        raise CheckpointError(f"{file} cannot be read: {error}", fix="resume from an earlier checkpoint") from error


def _steps(file: Path) -> int:
    try:
        state = json.loads(file.read_text())
        if state["format"] != FORMAT:
            raise CheckpointError(
                f"{file} has format {state['format']}, expected {FORMAT}", fix="use the version that wrote it"
            )
        return int(state["steps"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}", fix="resume from an earlier checkpoint") from error


def _compare(path: Path, expected: Mapping[str, torch.Size], found: Mapping[str, Tensor]) -> None:
    wrong = [f"{name} is missing" for name in expected if name not in found]
    wrong += [f"{name} is unknown" for name in found if name not in expected]
    wrong += [
        f"{name} has shape {tuple(found[name].shape)}, the model {tuple(shape)}"
        for name, shape in expected.items()
        if name in found and found[name].shape != shape
    ]
    if wrong:
        listed = "; ".join(wrong[:5]) + (f"; and {len(wrong) - 5} more" if len(wrong) > 5 else "")
        raise CheckpointError(
            f"the checkpoint {path} is of another model: {listed}",
            fix="resume with the model and lora settings it was saved with",
        )


def _rng_states() -> dict[str, Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states |= {f"cuda.{index}": state for index, state in enumerate(torch.cuda.get_rng_state_all())}
    return states


def _restore_rng(states: Mapping[str, Tensor]) -> None:
    torch.set_rng_state(states["cpu"].clone())
    for name, state in states.items():
        index = name.removeprefix("cuda.")
        if index.isdecimal() and int(index) < torch.cuda.device_count():
            torch.cuda.set_rng_state(state.clone(), int(index))
