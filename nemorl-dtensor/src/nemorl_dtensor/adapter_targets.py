"""Which layers of a model adapters go to: those that every token passes, and what is asked for by name."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from nemorl.errors import BackendError
from nemorl_rl.models.routers import names_experts
from torch import nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def all_linear(model: PreTrainedModel, beside_text: Sequence[str] = ()) -> list[str]:
    """Names of the linear layers that every token passes: not the output head, nothing in ``beside_text``, and of a
    mixture neither experts nor what chooses them.

    peft's own ``all-linear`` takes experts and routers in, and reads some families' dense and shared layers as experts,
    since they were called alike in transformers 4: those it cannot adapt, here or where the folder is loaded.
    """
    from peft import LoraConfig as PeftConfig
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
    from transformers.pytorch_utils import Conv1D

    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    found = {
        name: name.rpartition(".")[2]
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and module is not head and not _chooses(name)
        if not any(name.startswith(f"{part}.") for part in beside_text)
    }
    read = PeftConfig(target_modules=sorted(set(found.values())))
    convert_peft_config_for_transformers(read, model, None)
    assert read.target_modules is not None, "it was given"
    return [name for name, leaf in found.items() if leaf in read.target_modules]


def _chooses(name: str) -> bool:
    """The layer is a router, or a gate that weighs what others computed."""
    return name.endswith("gate") or "router" in name.split(".")


def expert_names(names: Collection[str]) -> list[str]:
    """Of LoRA's targets, those that are experts."""
    return [name for name in names if names_experts(name)]


def head_name(model: PreTrainedModel) -> str:
    """Of the output head.

    Raises:
        BackendError: It has none of its own.
    """
    head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    embedding: Any = model.get_input_embeddings()
    if head is None or head.weight is embedding.weight:
        raise BackendError(
            f"{type(model).__name__} has no output head but its embedding, which adapters of the head would change too",
            fix="set policy.lora.head: false",
        )
    (name,) = [str(name) for name, module in model.named_modules() if module is head]
    return name
