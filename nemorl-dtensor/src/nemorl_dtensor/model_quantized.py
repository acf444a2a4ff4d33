"""A frozen model in 4 bits under its adapters (QLoRA, arXiv:2305.14314), by transformers and bitsandbytes.

# O = outputs, I = inputs of a linear layer

Every linear layer but the output head has its weight as NF4: 4 bits per number and one scale per block of ``BLOCK``,
the scales in 8 bits again. Layers multiply with what is decoded from that, in the policy's precision.
"""

from __future__ import annotations

import importlib.util
import logging
from typing import TYPE_CHECKING, Any

import torch
from nemorl.errors import BackendError
from torch import Tensor, nn

if TYPE_CHECKING:
    from nemorl.config.models import TrainingOptions
    from transformers import PreTrainedModel

BLOCK = 64
"""Numbers that share a scale."""
SCALES = "nf4_scales"
"""Name of the buffers that make the scales part of what a model holds."""


def quantization(policy: TrainingOptions) -> Any:
    """How transformers loads the policy's base model in 4 bits.

    Raises:
        BackendError: bitsandbytes is not installed.
    """
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # that a kernel of some hub is not there is no news
    if importlib.util.find_spec("bitsandbytes") is None:
        raise BackendError(
            "policy.lora.base: nf4 needs bitsandbytes, which is not installed",
            fix='pip install "nemorl-dtensor[qlora]", or set policy.lora.base: full',
        )
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(  # type: ignore[no-untyped-call]
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=getattr(torch, policy.precision),
    )


def packed_layers(model: PreTrainedModel) -> dict[str, nn.Module]:
    """The layers of a model loaded by :func:`quantization`, by the name of their weight.

    Raises:
        BackendError: bitsandbytes would decode one of them wrongly.
    """
    from bitsandbytes.nn.modules import Linear4bit

    found: dict[str, nn.Module] = {}
    for name, layer in model.named_modules():
        if isinstance(layer, Linear4bit):
            if layer.weight.device.type == "cpu" and layer.in_features % BLOCK:
                raise BackendError(
                    f"bitsandbytes on the CPU decodes NF4 rightly only where the inputs of a layer are a multiple of "
                    f"{BLOCK}; {name.removesuffix('.base_layer')} has {layer.in_features}",
                    fix="set policy.lora.base: full, or train on a GPU",
                )
            found[f"{name}.weight"] = layer
    return found


def prepare_layers(model: PreTrainedModel) -> None:
    """Make packed layers fit to be trained through.

    Their scales become buffers, which leave a device's memory with the weights and are counted. And they are told that
    they train: on CPUs with AVX-512 bitsandbytes else repacks them for a bfloat16 kernel that has no gradient.
    """
    for layer in packed_layers(model).values():
        layer.train()
        weight: Any = layer.weight
        state = weight.quant_state
        for number, scales in enumerate((state.absmax, state.state2.absmax)):
            layer.register_buffer(f"{SCALES}_{number}", scales, persistent=False)


def decoded(layer: nn.Module) -> Tensor:
    """[O, I] the weight that a packed layer multiplies with."""
    from bitsandbytes.functional import dequantize_4bit

    weight: Any = layer.weight
    found: Tensor = dequantize_4bit(weight.data, weight.quant_state)
    return found
