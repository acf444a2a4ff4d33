"""Hugging Face causal language models, loaded the same way by training and generation.

Here: from a ``TrainingOptions`` to a model on its device, or to one without memory that is yet to be sharded. Not here:
adapters (``model_lora``), the head split (``model_head``), weights of sharded models (``sharded_weights``).
"""

from __future__ import annotations

import logging
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from nemorl.contracts.memory import DeviceMemoryError
from nemorl.errors import boundary
from nemorl_media.sight import Sight
from nemorl_media.slots import FAMILY, family_of
from nemorl_tensors.engines.model_config import name_or_path, read_model_config
from torch import nn

if TYPE_CHECKING:
    from nemorl.config.models import TrainingOptions
    from nemorl.contracts import Head
    from transformers import PreTrainedModel


def load_model(
    policy: TrainingOptions,
    device: str = "cpu",
    seed: int = 42,
    *,
    attn_implementation: str = "auto",
    head: Head = "language_model",
    quantization: Any = None,
) -> PreTrainedModel:
    """The policy's model in evaluation mode (no dropout), its parameters of ``policy.precision``.

    Args:
        policy: Which model, its precision, and whether its weights are loaded or random.
        device: torch device string.
        seed: Of ``init: random``, and of a value head that the files lack: same seed and versions, same weights. The
            global generators are left as they were.
        attn_implementation: A transformers attention kernel, or ``auto``.
        head: What stands on top of the decoder.
        quantization: Of weights that are loaded (``model_quantized``).

    Raises:
        BackendError: There is no such model, its architecture is unknown, or it does not fit into memory.
    """
    from transformers.utils import logging as transformers_logging

    # Its bars would tear the run's own display, and that a new value head is new is no news.
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    if head == "value":
        transformers_logging.get_logger("transformers.modeling_utils").setLevel(logging.ERROR)
    dtype = getattr(torch, policy.precision)
    try:
        # What ends for want of memory is told below; transformers is not to blame.
        owner = f"transformers, loading model {policy.model_name!r},"
        with boundary(owner, passing=(torch.OutOfMemoryError,)):
            config = load_config(policy, head)
            attention = _attention(config, attn_implementation)
            with torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(seed)  # weights are drawn on the CPU, and no other generator moves
                if policy.init == "random":
                    # Drawn in float32 whatever the precision: the same weights, rounded.
                    model = model_class(config, head).from_config(
                        config, dtype=torch.float32, attn_implementation=attention
                    )
                    _round(model, skeleton(policy, attn_implementation=attn_implementation, head=head))
                else:
                    packing = quantization or _decoding(config)
                    options = {} if packing is None else {"quantization_config": packing}
                    model = model_class(config, head).from_pretrained(
                        name_or_path(policy), config=config, dtype=dtype, attn_implementation=attention, **options
                    )
                    if quantization is None and packing is not None:  # decoded, to bfloat16 whatever the precision
                        _round(model, skeleton(policy, attn_implementation=attn_implementation, head=head))
            return _with_every_row(model.to(device).eval())
    except torch.OutOfMemoryError as error:
        raise DeviceMemoryError(
            f"model {policy.model_name!r} in {policy.precision} does not fit on {device}: {error}",
            fix="use policy.precision: bfloat16, a smaller model, or a device with more memory",
        ) from error


def _decoding(config: Any) -> Any:
    """What decodes weights that are stored in few bits, so that they learn; ``None`` for those that are not.

    gpt-oss is published in MXFP4, and DeepSeek-V3 in blocks of FP8. Left to itself, transformers keeps both as they are
    where a device can multiply them, and nothing in them has a gradient.
    """
    from transformers.utils.quantization_config import FineGrainedFP8Config, Mxfp4Config

    stored = getattr(config, "quantization_config", None) or {}
    kinds = {"mxfp4": Mxfp4Config, "fp8": FineGrainedFP8Config}
    method = stored.get("quant_method") if isinstance(stored, dict) else stored.quant_method
    kind = kinds.get(method or "")
    return None if kind is None else kind(dequantize=True)


def _round(model: PreTrainedModel, like: PreTrainedModel) -> None:
    """Give the tensors of a model the types that another of its kind has: rotary frequencies stay in float32."""
    types = {name: tensor.dtype for name, tensor in chain(like.named_parameters(), like.named_buffers())}
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        tensor.data = tensor.data.to(types[name])
    model.config.dtype = like.config.dtype


def skeleton(
    policy: TrainingOptions, *, attn_implementation: str = "auto", head: Head = "language_model"
) -> PreTrainedModel:
    """The policy's model in evaluation mode on torch's meta device: every shape and dtype, no memory, no weights."""
    with boundary(f"transformers, building model {policy.model_name!r},"), torch.device("meta"):
        config = load_config(policy, head)
        model = model_class(config, head).from_config(
            config,
            dtype=getattr(torch, policy.precision),
            attn_implementation=_attention(config, attn_implementation),
        )
    return _with_every_row(model.eval())


def _with_every_row(model: PreTrainedModel) -> PreTrainedModel:
    """A model whose embedding learns the row of the padding token too: it may be sampled, as the end of a response."""
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            module.padding_idx = None
    return model


def model_class(config: Any, head: Head = "language_model") -> Any:
    """transformers' own class for the head: any checkpoint of that kind loads, and what is saved loads elsewhere."""
    import transformers

    if head == "value":
        return transformers.AutoModelForSequenceClassification
    sees = FAMILY.of(config.model_type).filled() is not None
    return transformers.AutoModelForMultimodalLM if sees else transformers.AutoModelForCausalLM


def sight_of(model: PreTrainedModel, policy: TrainingOptions) -> Sight | None:
    """How the model sees or hears; ``None`` for one that reads text alone."""
    family = family_of(model.config, name_or_path(policy), policy.media.processor)
    return None if family is None else Sight(model, family)


def load_config(policy: TrainingOptions, head: Head = "language_model") -> Any:
    """The model's transformers config, with one label under a value head."""
    config = read_model_config(policy, **({"num_labels": 1} if head == "value" else {}))
    if config.model_type == "rwkv":
        # In evaluation mode it would divide weights in place at its first forward pass, those of the trainer as well.
        config.rescale_every = 0
    return config


def _attention(config: Any, requested: str) -> str | None:
    """The kernel to ask transformers for; ``None`` lets it take sdpa where the architecture has it, else eager."""
    if requested != "auto":
        return requested
    # sdpa has no cap on attention scores (Gemma 2); transformers 4 drops it without a word.
    return "eager" if getattr(config, "attn_logit_softcapping", None) is not None else None
