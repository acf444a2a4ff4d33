"""A policy as a Hugging Face folder: config and safetensors. Its tokenizer: ``nemorl_tensors.engines.model_folder``."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from nemorl_tensors.engines.model_folder import write_weights
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def save_pretrained(path: Path, model: PreTrainedModel, tensors: Iterable[tuple[str, Tensor]], rank: int) -> None:
    """Write ``model`` without a tokenizer. Collective where it is spread over ranks; rank 0 writes.

    Args:
        path: Created if needed.
        model: The policy.
        tensors: Its weights under the names of published checkpoints, each put together as it is asked for.
        rank: Of this process.
    """
    if rank > 0:
        for _ in tensors:
            pass
        return
    path.mkdir(parents=True, exist_ok=True)
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__.removeprefix("FSDP")]  # FSDP2 renames the class
    config.dtype = model.dtype
    vars(config).pop("quantization_config", None)  # what is written is decoded
    config.save_pretrained(path)
    if model.can_generate() and model.generation_config is not None:
        model.generation_config.save_pretrained(path)
    write_weights(path, tensors)
