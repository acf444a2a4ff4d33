"""Low-rank adapters apart from the model that they adapt: what a training backend offers that can hand them over."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

ADAPTERS = "adapters"
"""The capability. A training backend that declares it is an :class:`AdapterBackend`."""


class AdapterBackend(Protocol):
    """A training backend whose adapters can be read apart from the model (capability ``adapters``).

    Example:
        >>> names = [name for bucket in backend.export_adapters() for name in bucket]  # doctest: +SKIP
    """

    def export_adapters(self) -> Iterator[Mapping[str, Tensor]]:
        """Buckets of the adapters' tensors, as ``export_weights`` yields those of the whole model.

        Names are those of peft's files: ``base_model.model.<module>.lora_A.weight`` [R, I] and ``…lora_B.weight``
        [O, R], for a rank R and a linear layer of I inputs and O outputs.
        """
        ...

    def save_adapters(self, path: Path) -> None:
        """Write the folder that ``peft.PeftModel.from_pretrained`` loads: ``adapter_config.json`` and
        ``adapter_model.safetensors``."""
        ...
