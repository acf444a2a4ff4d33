"""Comparison of a backend's recorded activations (capability ``activations``) with those of transformers."""

# T = tokens of a forward pass, F = features

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from nemorl_tensors.engines.observing import Activations, Place
from torch import Tensor

from nemorl_testing.backends import expect_close, model_folder, reference
from nemorl_testing.kit import Subject, expect

ACTIVATIONS = "activations"
"""The capability."""
RELATIVE = 1e-4
"""Largest allowed difference, of the largest value of a tensor."""


def expect_those_of_transformers(subject: Subject, found: Activations, token_ids: Sequence[int]) -> None:
    """Of all ``token_ids``: what each layer is given, what its attention and its MLP add, the final norm and the
    logits, where they were recorded; the last two may be of the last tokens alone. Something of every layer has to be.
    """
    computed = _computed(subject, token_ids)
    expect(Place(None, "logits") in found, f"logits were not recorded, but {len(found)} other places")
    silent = {place.layer for place in computed} - {place.layer for place in computed.keys() & found.keys()}
    expect(not silent, f"neither layer_input, attention nor mlp was recorded of layers {sorted(map(str, silent))}")
    for place in sorted(computed.keys() & found.keys(), key=lambda place: place.order):
        rows, wanted = found[place], computed[place]
        same = wanted[-len(rows) :] if place.layer is None else wanted
        expect_close(rows, same, RELATIVE * float(same.abs().max()), place.description)


def _computed(subject: Subject, token_ids: Sequence[int]) -> dict[Place, Tensor]:
    model, found = reference(model_folder(subject)), dict[Place, Tensor]()

    def record(place: Place, output: Any) -> None:
        found[place] = (output[0] if isinstance(output, tuple) else output)[0]

    handles = [
        module.register_forward_hook(lambda _, _inputs, output, place=place: record(place, output))
        for name, module in model.named_modules()
        if (place := _place(name)) is not None
    ]
    with torch.no_grad():
        output = model(input_ids=torch.tensor([token_ids]), output_hidden_states=True)
    for handle in handles:
        handle.remove()
    *streams, normed = (states[0] for states in output.hidden_states)  # the last one after the final norm
    found |= {Place(layer, "layer_input"): stream for layer, stream in enumerate(streams)}
    return {**found, Place(None, "final_norm"): normed, Place(None, "logits"): output.logits[0]}


def _place(module: str) -> Place | None:
    """Of the output of a module, by its name in transformers' models."""
    named = re.search(r"\.layers\.(\d+)\.(self_attn\.o_proj|mlp)$", module)
    return None if named is None else Place(int(named[1]), "mlp" if named[2] == "mlp" else "attention")
