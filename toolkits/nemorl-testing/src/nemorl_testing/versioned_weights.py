"""Two versions of a policy's weights as they reach an engine that holds several: whole, or as adapters alone."""

# R = rank, O = outputs, I = inputs

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from nemorl.weights import Form, WeightHandle, in_process_handle
from nemorl_rl.serving.snapshots import ADAPTER_SNAPSHOTS, SNAPSHOTS
from torch import Tensor, nn

from nemorl_testing.adapters import LORA, PREFIX, RANK, SCALE, SUFFIX_A, SUFFIX_B
from nemorl_testing.backends import model_folder, other_model
from nemorl_testing.kit import NotApplicable, Subject
from nemorl_testing.models import load_reference


@dataclass(frozen=True)
class Weights:
    """Tensors of a version."""

    model: Any
    """Plain transformers with these weights."""
    tensors: Mapping[str, Tensor]
    """That travel."""
    form: Form

    def handle(self, version: int) -> WeightHandle:
        """The live tensors, handed over in process."""

        def export() -> Iterator[Mapping[str, Tensor]]:
            yield self.tensors

        return replace(in_process_handle(export, version), form=self.form)


def two_weights(subject: Subject) -> tuple[Weights, Weights]:
    """Different ones, in the form of which the backend holds several versions.

    Raises:
        NotApplicable: It holds one.
    """
    if SNAPSHOTS in subject.config.supports:
        return _whole(load_reference(model_folder(subject))), _whole(other_model(subject))
    if ADAPTER_SNAPSHOTS in subject.config.supports:
        return _adapted(subject, seed=1), _adapted(subject, seed=2)
    raise NotApplicable(f"the backend does not declare supports={{{SNAPSHOTS!r}}} or {{{ADAPTER_SNAPSHOTS!r}}}")


def policy_of(weights: Weights) -> Mapping[str, Any]:
    """Fields of the policy that has them."""
    return {"lora": LORA} if weights.form == "adapters" else {}


def _whole(model: Any) -> Weights:
    return Weights(model, dict(model.named_parameters()), "model")


@torch.no_grad()
def _adapted(subject: Subject, seed: int) -> Weights:
    """W + alpha / rank * B A in place of every layer's W (arXiv:2106.09685)."""
    model, random = load_reference(model_folder(subject)), torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear) and layer is not model.get_output_embeddings():
            outputs, inputs = layer.weight.shape
            a_RI = torch.randn(RANK, inputs, generator=random) * 0.2
            b_OR = torch.randn(outputs, RANK, generator=random) * 0.05
            layer.weight += SCALE * b_OR @ a_RI
            tensors |= {PREFIX + name + SUFFIX_A: a_RI, PREFIX + name + SUFFIX_B: b_OR}
    return Weights(model, tensors, "adapters")
