"""Which tensors make up the parts of a policy that leave a device's memory and come back (``OffloadingBackend``).

A part leaves for two reasons. The driver sends it away while others work, and work with it is refused until the driver
brings it back. Or the config has it rest in the host's memory: then whatever needs it has it brought in.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn

from nemorl_tensors.engines.parking import Parking, bytes_held

if TYPE_CHECKING:
    from nemorl.contracts.memory import MemoryPart


class OptimizerMemory(Protocol):
    """Tensors that an optimizer keeps."""

    def gradients(self) -> Iterable[Tensor]:
        """Those that there are now. A step begins by clearing them."""
        ...

    def tensors(self) -> Mapping[str, Tensor]:
        """Masters that are not the weights themselves, and moments."""
        ...


class Residency:
    """Moves the parts of one rank's policy."""

    def __init__(
        self,
        model: Sequence[nn.Module],
        frozen: Sequence[nn.Module],
        optimizer: Callable[[], OptimizerMemory | None],
        device: str,
        resting: Collection[MemoryPart] = (),
    ) -> None:
        """
        Args:
            model: What is trained.
            frozen: Its initial copy; nothing where there is none, or where the model without its adapters is it.
            optimizer: The optimizer, once there is one.
            device: Of this rank. Tensors that lie elsewhere are none of its memory.
            resting: Parts that lie in the host's memory between the moments that need them.
        """
        self._model, self._frozen, self._optimizer = model, frozen, optimizer
        self._kind, self._resting = torch.device(device).type, resting
        self._parking = Parking()

    def offload(self, parts: Sequence[MemoryPart], *, keep_gradients: bool) -> None:
        """
        Args:
            parts: Leave the device.
            keep_gradients: They will be added to. Else they are cleared or about to be: what they hold is nobody's.
        """
        for part in parts:
            self._parking.rename(_resting(part), part)  # its content is in the host's memory already
            self._parking.leave(part, self._tensors(part), forget=part == "gradients" and not keep_gradients)

    def onload(self, parts: Sequence[MemoryPart]) -> None:
        for part in parts:
            if part in self._resting:
                self._parking.rename(part, _resting(part))
            self._parking.come_back(part)

    def expect(self, *parts: MemoryPart) -> None:
        """Refuse work that needs a part which the driver has sent away.

        Raises:
            BackendError: names the part.
        """
        self._parking.require(*parts)

    def require(self, *parts: MemoryPart) -> None:
        """Have these parts on the device: those that rest come in.

        Raises:
            BackendError: One is away; names it.
        """
        self._parking.require(*parts)
        for part in parts:
            self._parking.come_back(_resting(part))

    def rest(self) -> None:
        """Let the parts that may rest do so. Those that are away, or rest already, stay where they are."""
        for part in self._resting:
            if not self._parking.has(part):
                self._parking.leave(_resting(part), self._tensors(part))

    def held_bytes(self) -> Mapping[MemoryPart, int]:
        parts: tuple[MemoryPart, ...] = ("weights", "gradients", "optimizer", "reference")
        return {part: bytes_held(self._tensors(part)) for part in parts}

    def _tensors(self, part: MemoryPart) -> Iterable[Tensor]:
        return (tensor for tensor in self._all_tensors(part) if tensor.device.type == self._kind)

    def _all_tensors(self, part: MemoryPart) -> Iterable[Tensor]:
        if part in ("weights", "reference"):
            return _of(self._model if part == "weights" else self._frozen)
        optimizer = self._optimizer()
        if optimizer is None:
            return ()
        return optimizer.gradients() if part == "gradients" else optimizer.tensors().values()


def _resting(part: MemoryPart) -> str:
    """Its name while it rests."""
    return f"resting {part}"


def _of(modules: Sequence[nn.Module]) -> Iterable[Tensor]:
    for module in modules:
        yield from chain((parameter.detach() for parameter in module.parameters()), module.buffers())
