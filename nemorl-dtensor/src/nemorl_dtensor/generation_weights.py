"""The model a generator runs: an empty shell whose parameters are the trainer's live tensors.

Nothing is copied where model and checkpoint have the same form: an update in place by the trainer is already visible,
and tensors that are new each time (merged adapters) replace the previous ones. Experts of mixtures, which come one by
one and are held together, are copied.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from nemorl.errors import BackendError, boundary
from nemorl.weights import Digest, WeightHandle
from nemorl_rl.models.model_geometry import is_mtp_tensor, mtp_layers
from nemorl_tensors.engines.buckets import CountedBuckets
from nemorl_tensors.engines.digests import digests
from torch import Tensor, nn

from nemorl_dtensor.model import load_config, model_class
from nemorl_dtensor.published_names import PublishedNames

if TYPE_CHECKING:
    from nemorl.config.models import PolicyConfig
    from transformers import PreTrainedModel


def empty_model(policy: PolicyConfig, device: str) -> PreTrainedModel:
    """The policy's architecture with its buffers (rotary frequencies) on ``device`` and no weights."""
    config = load_config(policy)
    # transformers' sdpa kernel ignores Gemma 2's cap on attention scores.
    attention = "eager" if getattr(config, "attn_logit_softcapping", None) is not None else None
    with boundary(f"transformers, building {policy.model_name!r},"), _parameters_on_meta():
        model = model_class(config).from_config(
            config, dtype=getattr(torch, policy.precision), attn_implementation=attention
        )
    for module in model.modules():
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.to(device)
    return model.eval()  # type: ignore[no-any-return]


def bind_weights(
    model: PreTrainedModel, names: PublishedNames, handle: WeightHandle, device: torch.device, *, copies: bool = False
) -> int:
    """Point the parameters of ``model`` at the tensors of ``handle``, sharing their memory where the form is the same.

    Args:
        model: Its buffers are on ``device``.
        names: Of its published tensors.
        handle: The weights.
        device: Weights that arrive elsewhere (``shared_memory`` brings them to the CPU) are copied to it.
        copies: All are copied: whoever sent them will write others into their memory.

    Returns:
        Bytes of these tensors.

    Raises:
        BackendError: Names or shapes are not those of the model.
    """
    buckets = CountedBuckets(handle.buckets())
    sent = (item for bucket in buckets for item in bucket.items())
    if mtp_layers(model.config.to_dict()):  # transformers has none of them
        layers = model.config.num_hidden_layers
        sent = (item for item in sent if not is_mtp_tensor(item[0], layers))
    for name, tensor in names.in_memory(sent):
        _bind(model, name, tensor.detach().to(device, copy=copies))
    # An output head tied to the embedding may travel under one name only.
    model.tie_weights()
    missing = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if missing:
        raise BackendError(
            f"the trainer sent no weights for {len(missing)} parameters: {', '.join(missing[:5])}",
            fix="export every parameter under its Hugging Face name",
        )
    return buckets.nbytes


def held_digests(model: PreTrainedModel, names: PublishedNames, asked: Collection[str]) -> dict[str, Digest]:
    """Digests of the tensors of ``model`` that have these names, in its memory or in checkpoints."""
    held = model.state_dict()
    here = {name: held[name] for name in asked if name in held}
    if len(here) < len(asked):
        here |= {name: tensor for name, tensor in names.published(held.items()) if name in asked and name not in here}
    return digests(here)


def _bind(model: PreTrainedModel, name: str, tensor: Tensor) -> None:
    owner_name, _, leaf = name.rpartition(".")
    slots: Mapping[str, Any] = {}
    try:
        owner = model.get_submodule(owner_name)
        slots = owner._parameters if leaf in owner._parameters else owner._buffers
        current = slots[leaf]
    except (AttributeError, KeyError):
        current = None
    if current is None or current.shape != tensor.shape:
        problem = "has no such parameter" if current is None else f"expects shape {tuple(current.shape)}"
        raise BackendError(
            f"the trainer sent {name!r} of shape {tuple(tensor.shape)}, but the model {problem}",
            fix="train and generate with the same model_name, and export Hugging Face names",
        )
    slots[leaf] = nn.Parameter(tensor, requires_grad=False) if slots is owner._parameters else tensor  # type: ignore[index]


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Parameters of modules built inside have shapes but no memory; buffers are real."""
    register = nn.Module.register_parameter

    def register_empty(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        # One that is on meta already is being tied: it must stay the same object.
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.detach().to("meta"), requires_grad=False)
        register(self, name, param)

    nn.Module.register_parameter = register_empty  # type: ignore
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
