"""Which tensors make up the parts of a policy that leave a device's memory and come back (``OffloadingBackend``)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING

from nemorl_tensors.engines.parking import Parking, bytes_held
from torch import Tensor, nn

if TYPE_CHECKING:
    from nemorl_rl.memory import MemoryPart

    from nemorl_dtensor.optim import Optimizer


class Residency:
    """Moves the parts of one rank's policy."""

    def __init__(self, model: nn.Module, frozen: nn.Module | None, optimizer: Callable[[], Optimizer | None]) -> None:
        """
        Args:
            model: What is trained.
            frozen: Its initial copy; ``None``: there is none, or the model without its adapters is it.
            optimizer: The optimizer, once there is one.
        """
        self._model, self._frozen, self._optimizer = model, frozen, optimizer
        self._parking = Parking()

    def offload(self, parts: Sequence[MemoryPart]) -> None:
        for part in parts:
            self._parking.leave(part, self._tensors(part))

    def onload(self, parts: Sequence[MemoryPart]) -> None:
        for part in parts:
            self._parking.come_back(part)

    def require(self, *parts: MemoryPart) -> None:
        """Refuse work that needs a part which is away."""
        self._parking.require(*parts)

    def held_bytes(self) -> Mapping[MemoryPart, int]:
        parts: tuple[MemoryPart, ...] = ("weights", "gradients", "optimizer", "reference")
        return {part: bytes_held(self._tensors(part)) for part in parts}

    def _tensors(self, part: MemoryPart) -> Iterable[Tensor]:
        if part == "weights":
            return _of(self._model)
        if part == "reference":
            return _of(self._frozen) if self._frozen is not None else ()
        optimizer = self._optimizer()
        if optimizer is None:
            return ()
        return optimizer.gradients() if part == "gradients" else optimizer.tensors().values()


def _of(module: nn.Module) -> Iterable[Tensor]:
    return chain((parameter.detach() for parameter in module.parameters()), module.buffers())
