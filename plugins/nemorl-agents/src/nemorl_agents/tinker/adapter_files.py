"""Snapshots as adapters: for engines that hold several of these on one base, read from the files of each snapshot.

An engine is built for adapters of one rank and one scale. Those of a smaller rank are filled up with zeros, and their
own scale goes into the second factor: what the two add to a layer stays the same.

# R = the engine's rank, r = a snapshot's, O = outputs of a layer, I = its inputs
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from nemorl.config.models import LoraConfig
from nemorl.contracts import AdapterShape
from nemorl.errors import DataError
from nemorl.weights import WeightHandle, in_process_handle
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

FACTORS = "adapter_model.safetensors"
FIRST = ".lora_A.weight"
"""Ends the name of a layer's first factor; the second's ends with B."""


@dataclass(frozen=True)
class AdapterFiles:
    """Hands adapters of snapshots to an engine."""

    lora: LoraConfig
    """What the engine is built for."""
    base: Mapping[str, Tensor]
    """An adapter that leaves the base as it is, by names of peft."""

    def base_handle(self, version: int) -> WeightHandle:
        """The base itself."""
        return _handle(self.base, version)

    def handle(self, folder: Path, shape: AdapterShape, version: int) -> WeightHandle:
        """A snapshot by its folder.

        Raises:
            DataError: Its files are gone or broken.
        """
        try:
            found = load_file(folder / FACTORS)
        except (OSError, SafetensorError) as error:
            raise DataError("the weights of this sampling client cannot be read", fix="sample from others") from error
        scale = (shape.alpha / shape.rank) / (self.lora.alpha / self.lora.rank)
        return _handle({name: self._fitted(name, factor, scale) for name, factor in found.items()}, version)

    def _fitted(self, name: str, factor: Tensor, scale: float) -> Tensor:
        if name.endswith(FIRST):  # [r, I] to [R, I]
            return nn.functional.pad(factor, (0, 0, 0, self.lora.rank - len(factor)))
        return nn.functional.pad(factor * scale, (0, self.lora.rank - factor.shape[1]))  # [O, r] to [O, R]


def adapted_modules(factors: Mapping[str, Tensor]) -> tuple[str, ...]:
    """The last part of each adapted layer's name.

    >>> import torch
    >>> adapted_modules({"base_model.model.model.layers.0.mlp.up_proj.lora_A.weight": torch.zeros(1, 1)})
    ('up_proj',)
    """
    return tuple(sorted({name.rsplit(".", 3)[-3] for name in factors}))


def _handle(factors: Mapping[str, Tensor], version: int) -> WeightHandle:
    def export() -> Iterator[Mapping[str, Tensor]]:
        yield factors

    return replace(in_process_handle(export, version), form="adapters")
