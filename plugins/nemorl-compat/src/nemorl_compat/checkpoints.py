"""A checkpoint of NeMo RL as a Hugging Face folder, which any run starts from (``model: FOLDER``).

Its layout: ``step_N/config.yaml``, ``step_N/policy/weights`` (torch.distributed.checkpoint: an index and ``.distcp``
files, or safetensors that ranks wrote, in a folder ``model`` below since its DTensor workers of version 2, in a folder
``iter_0000000`` of its Megatron workers) and ``step_N/policy/tokenizer``. Names of tensors are those of transformers,
of version 1 behind ``model.``, of experts also those that are published (``stored_experts``); or megatron-core's
(``megatron_names``).
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemorl.base.files.atomic import replacing_folder
from nemorl.base.text.reading import UnreadableError, parse_json, read_text
from nemorl.base.text.suggest import did_you_mean
from nemorl.config import PolicyConfig
from nemorl.errors import CheckpointError, UsageError, boundary

from nemorl_compat.legacy_yaml import loaded

if TYPE_CHECKING:
    from torch import Tensor

PREFIXES = ("", "model.")
MEGATRON_FIX = "convert it with NeMo RL's own examples/converters/convert_megatron_to_hf.py, then use model: FOLDER"


@dataclass(frozen=True)
class Source:
    """The parts of a checkpoint."""

    weights: Path
    """Folder of the tensors"""
    tokenizer: Path | None
    config: Mapping[str, Any]
    """The run's, empty where it is not there"""


def import_checkpoint(path: Path, output: Path, model: str | None = None) -> str:
    """Write the policy of a checkpoint of NeMo RL as a model folder. Reading it runs no code of it.

    Args:
        path: ``step_N``, or the folder of the weights.
        output: Folder to write; must not exist yet.
        model: Hugging Face name or folder of the model that was trained. Unset: as ``config.yaml`` says.

    Returns:
        The name of that model.

    Raises:
        UsageError: It is none, is of a kind that cannot be read, or does not say which model it is of.
        CheckpointError: It is damaged, or of another model.
    """
    if output.exists():
        raise UsageError(f"{output} exists", fix="choose another folder")
    source = find(path)
    settings = source.config.get("policy") or {}
    name = model or settings.get("model_name")
    if not name:
        raise UsageError(f"{path} has no config.yaml that names its model", fix="give the model with --model")
    policy = PolicyConfig(model_name=name, hf_config_overrides=settings.get("hf_config_overrides") or {})
    with replacing_folder(output) as draft:
        _convert(source.weights, policy, draft)
        if source.tokenizer is not None:
            shutil.copytree(source.tokenizer, draft, dirs_exist_ok=True)
        else:
            from nemorl_tensors.engines.model_folder import save_tokenizer

            save_tokenizer(draft, name)
    return str(name)


def find(path: Path) -> Source:
    """The parts of a checkpoint, from any folder of it.

    Raises:
        UsageError: There are no weights that can be read.
    """
    if not path.is_dir():
        raise UsageError(f"there is no folder {path}", fix="give a folder step_N of a run's checkpoints")
    places = [path / "policy" / "weights", path / "weights", path]
    weights = next((place for place in places if place.is_dir() and _has_weights(place)), path)
    weights = weights / "model" if _holds_tensors(weights / "model") else weights
    weights = _last_iteration(weights) or weights
    _require_readable(weights)
    step = next((parent for parent in (path, *path.parents[:3]) if (parent / "policy").is_dir()), path)
    tokenizer = step / "policy" / "tokenizer"
    file = step / "config.yaml"
    is_whole = tokenizer.is_dir() and any(tokenizer.iterdir())
    return Source(weights, tokenizer if is_whole else None, loaded(file) if file.is_file() else {})


def _last_iteration(weights: Path) -> Path | None:
    """The newest folder that Megatron has saved into, if it has."""
    return max(weights.glob("iter_*"), key=lambda folder: folder.name, default=None)


def _has_weights(folder: Path) -> bool:
    return _holds_tensors(folder) or _holds_tensors(folder / "model") or any(folder.glob("iter_*"))


def _holds_tensors(folder: Path) -> bool:
    return (folder / ".metadata").is_file() or any(folder.glob("*.safetensors"))


def _require_readable(weights: Path) -> None:
    if _is_of_megatron(weights):
        _require_torch_dist(weights)
    if not _holds_tensors(weights):
        raise UsageError(f"{weights} holds no weights", fix="give a folder step_N of a run's checkpoints")
    if (weights / "config.json").is_file():
        raise UsageError(f"{weights} is a Hugging Face folder already", fix=f"use model: {weights}")
    if any("adapter" in file.name for file in weights.iterdir()):
        raise UsageError(
            f"{weights} holds LoRA adapters, not a model",
            fix="merge them with NeMo RL's own examples/converters/convert_lora_to_hf.py",
        )


def _is_of_megatron(weights: Path) -> bool:
    return weights.name.startswith("iter_") or (weights / "common.pt").is_file()


def _require_torch_dist(weights: Path) -> None:
    """One of megatron-core's formats holds whole tensors as ``torch.distributed.checkpoint`` does; others do not."""
    file = weights / "metadata.json"
    try:
        said = parse_json(read_text(file)) if file.is_file() else {}
    except UnreadableError as error:
        raise CheckpointError(f"{file} cannot be read: {error}", fix="give a checkpoint that is whole") from error
    kind = said.get("sharded_backend") if isinstance(said, dict) else None
    if kind != "torch_dist" or not (weights / ".metadata").is_file():
        raise UsageError(
            f"{weights} is a Megatron checkpoint of format {kind or 'torch'}, and the one that is read is torch_dist",
            fix=MEGATRON_FIX,
        )


def _convert(weights: Path, policy: PolicyConfig, output: Path) -> None:
    import torch
    from nemorl_tensors.engines.model_config import read_model_config
    from transformers import AutoModelForCausalLM

    config = read_model_config(policy)
    with boundary(f"transformers, building model {policy.model_name!r},"), torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
    expected = {name: tensor.shape for name, tensor in model.state_dict().items()}
    tied = set(getattr(model, "all_tied_weights_keys", {}) or {})
    read = _read_of_megatron if _is_of_megatron(weights) else partial(_read, policy.model_name)
    tensors = read(weights, config, expected, tied)
    with boundary(f"transformers, writing model {policy.model_name!r},"):
        model.load_state_dict(tensors, strict=False, assign=True)
        model.tie_weights()
        model.save_pretrained(output)


def _read(
    model_name: str, weights: Path, _config: Any, expected: Mapping[str, tuple[int, ...]], tied: set[str]
) -> dict[str, Tensor]:
    """The tensors of a model, of a checkpoint under names of transformers."""
    import torch

    from nemorl_compat import dcp
    from nemorl_compat.stored_experts import stored_parts

    entries = dcp.entries(weights)
    prefix = max(PREFIXES, key=lambda prefix: len(expected.keys() & {_without(prefix, name) for name in entries}))
    found = {_without(prefix, name): entry for name, entry in entries.items()}
    parts = stored_parts(expected, found)
    shapes = {name: entry.size for name, entry in found.items()}
    _require_model(weights, model_name, {name: part.shape for name, part in parts.items()}, shapes, tied)
    kinds = {part.name: found[name].properties.dtype for name, part in parts.items() if name in found}
    tensors = {name: torch.empty(expected[name], dtype=kind) for name, kind in kinds.items()}
    there = {name: part for name, part in parts.items() if name in found}
    dcp.read_into(weights, {prefix + name: part.within(tensors[part.name]) for name, part in there.items()})
    return tensors


def _read_of_megatron(
    weights: Path, config: Any, expected: Mapping[str, tuple[int, ...]], tied: set[str]
) -> dict[str, Tensor]:
    """The same of a checkpoint under megatron-core's names."""
    import torch

    from nemorl_compat import dcp
    from nemorl_compat.megatron_names import Layers, is_of_weights, transformers_tensors

    entries = {name: entry for name, entry in dcp.entries(weights).items() if is_of_weights(name)}
    tensors = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in entries.items()}
    dcp.read_into(weights, tensors)
    return transformers_tensors(config, expected, Layers(str(weights), tensors), tied)


def _without(prefix: str, name: str) -> str:
    return name[len(prefix) :] if name.startswith(prefix) else f"<not {prefix}>{name}"


def _require_model(
    weights: Path,
    model: str,
    expected: Mapping[str, tuple[int, ...]],
    found: Mapping[str, tuple[int, ...]],
    tied: set[str],
) -> None:
    wrong = [f"{name} is missing" for name in expected if name not in found and name not in tied]
    wrong += [f"{name} is unknown{_guess(name, expected)}" for name in found if name not in expected]
    wrong += [
        f"{name} is {list(found[name])}, in the model {list(shape)}"
        for name, shape in expected.items()
        if name in found and tuple(found[name]) != tuple(shape)
    ]
    require_none(wrong, weights, model)


def require_none(wrong: Sequence[str], folder: object, model: str) -> None:
    """Nothing differs between a checkpoint and the model that it is said to be of."""
    if wrong:
        listed = "; ".join(wrong[:5]) + (f"; and {len(wrong) - 5} more" if len(wrong) > 5 else "")
        raise CheckpointError(
            f"{folder} is no checkpoint of {model}: {listed}", fix="give the model that was trained with --model"
        )


def _guess(name: str, expected: Mapping[str, Any]) -> str:
    guess = did_you_mean(name, expected)
    return f" ({guess})" if guess else ""
