"""A policy as a Hugging Face folder: config and safetensors. The tokenizer is ``nemorl.tensors.model_folder``'s."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from nemorl.tensors.model_folder import write_weights
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def save_pretrained(path: Path, model: PreTrainedModel, tensors: Iterable[tuple[str, Tensor]] | None = None) -> None:
    """Write ``model``, which is in this process, without a tokenizer.

    Args:
        path: Created if needed.
        model: The policy.
        tensors: Its weights under Hugging Face names where they differ from its own (merged adapters).
    """
    path.mkdir(parents=True, exist_ok=True)
    if tensors is not None:
        with torch.device("meta"):
            plain = type(model)(model.config)
        plain.load_state_dict(dict(tensors), strict=False, assign=True)
        plain.tie_weights()  # a tensor of two names comes under one
        missing = [name for name, parameter in plain.named_parameters() if parameter.is_meta]
        assert not missing, f"no weights for {missing}"
        plain.generation_config = model.generation_config
        model = plain
    model.save_pretrained(path)


def save_sharded(path: Path, model: PreTrainedModel, tensors: Iterable[tuple[str, Tensor]], rank: int) -> None:
    """Write ``model``, which is spread over ranks, without a tokenizer. Collective; rank 0 writes.

    Args:
        path: Created if needed.
        model: The policy.
        tensors: Its weights under Hugging Face names, each put together as it is asked for.
        rank: Of this process.
    """
    if rank > 0:
        for _ in tensors:
            pass
        return
    path.mkdir(parents=True, exist_ok=True)
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__.removeprefix("FSDP")]  # FSDP2 renames the class
    config.save_pretrained(path)
    if model.can_generate() and model.generation_config is not None:
        model.generation_config.save_pretrained(path)
    write_weights(path, tensors)
