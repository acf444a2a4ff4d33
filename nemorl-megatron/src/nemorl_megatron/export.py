"""A policy as a Hugging Face folder, written by rank 0 as the tensors come."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from nemorl.base.files.atomic import replace_text
from nemorl_tensors.engines.model_config import read_model_config
from nemorl_tensors.engines.model_folder import save_tokenizer, write_weights
from safetensors.torch import save_file

if TYPE_CHECKING:
    from nemorl.config.models import TrainingOptions
    from nemorl.contracts import Head
    from torch import Tensor


def save_pretrained(
    path: Path,
    policy: TrainingOptions,
    buckets: Iterable[Mapping[str, Tensor]],
    rank: int,
    head: Head = "language_model",
) -> None:
    """Write config, safetensors and tokenizer. Collective; rank 0 writes.

    Args:
        path: Created if needed.
        policy: Which model this is.
        buckets: Whole tensors under Hugging Face names, each put together as it is asked for.
        rank: Of this process.
        head: What stands on top of the decoder: a value head makes it a sequence classifier with one label.
    """
    if rank > 0:
        for _ in buckets:
            pass
        return
    from transformers.models.auto import modeling_auto

    path.mkdir(parents=True, exist_ok=True)
    config = read_model_config(policy, **({"num_labels": 1} if head == "value" else {}))
    classes = {
        "language_model": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        "value": modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    }
    config.architectures = [classes[head][config.model_type]]
    config.dtype = policy.precision
    config.save_pretrained(path)
    write_weights(path, (item for bucket in buckets for item in bucket.items()))
    save_tokenizer(path, policy.model_name, policy.tokenizer)


def with_copies(
    buckets: Iterable[Mapping[str, Tensor]], copies: Callable[[str], Sequence[str]]
) -> Iterator[Mapping[str, Tensor]]:
    """The same, each tensor also under the further names that files hold it by."""
    for bucket in buckets:
        yield {**bucket, **{copy: tensor.clone() for name, tensor in bucket.items() for copy in copies(name)}}


def save_adapters(path: Path, policy: TrainingOptions, tensors: Mapping[str, Tensor]) -> None:
    """Write the folder that ``peft.PeftModel.from_pretrained`` loads.

    Args:
        path: Created if needed.
        policy: The model that is adapted, and how.
        tensors: Whole factors under the names of peft's files, on the CPU.
    """
    lora = policy.lora
    assert lora is not None, "there are adapters"
    leaves = sorted({name.split(".")[-3] for name in tensors})
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": policy.model_name,
        "inference_mode": True,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "bias": "none",
        "target_modules": leaves if lora.target_modules == "all-linear" else sorted(lora.target_modules),
    }
    path.mkdir(parents=True, exist_ok=True)
    replace_text(path / "adapter_config.json", json.dumps(settings, indent=2) + "\n")
    save_file({**tensors}, path / "adapter_model.safetensors", metadata={"format": "pt"})
