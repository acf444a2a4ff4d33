"""Several adapters on one base: one is in place, the others lie on a shelf with all that belongs to them.

To put another one in place is to copy its tensors over those that are there: the model, its layout over ranks and the
optimizer stay the objects that they are. An adapter of lower rank or of fewer layers has zeros for the rest, which stay
zeros (``model_lora``).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from nemorl.contracts import AdapterShape
from nemorl.errors import UsageError
from nemorl_tensors.engines.checkpoint_files import random_state, restore_random_state
from nemorl_tensors.engines.rank_backend import Gathered
from torch import Tensor, nn

from nemorl_dtensor.model_lora import Adapters
from nemorl_dtensor.optim import Optimizer
from nemorl_dtensor.ranks import local, offsets

POLICY = "policy"
"""The adapter of ``policy.lora``, which is there from the first."""


@dataclass
class Shelved:
    """An adapter that is not in place: this rank's parts."""

    shape: AdapterShape
    weights: dict[str, Tensor]
    random: dict[str, Tensor]
    """Generators: dropout draws from them"""
    moments: dict[str, Tensor] = field(default_factory=dict)
    """The optimizer's state; nothing before its first update"""
    gradients: dict[str, Tensor] = field(default_factory=dict)
    gathered: Gathered = "nothing"
    steps: int = 0
    rate_scale: float = 1.0

    @property
    def nbytes(self) -> int:
        parts = (self.weights, self.moments, self.gradients)
        return sum(tensor.nbytes for part in parts for tensor in part.values())

    def move(self, device: str) -> None:
        for part in (self.weights, self.moments, self.gradients):
            for name, tensor in part.items():
                part[name] = tensor.to(device)


class Shelf:
    """The adapters of a model, one of which is in place."""

    def __init__(
        self,
        adapters: Adapters,
        parameters: Mapping[str, nn.Parameter],
        optimizer: Optimizer,
        device: str,
        room_bytes: int,
    ) -> None:
        """
        Args:
            adapters: In place; their layers and rank bound those of others.
            parameters: Theirs, by name, whole or sharded.
            optimizer: Of these.
            device: Of the model.
            room_bytes: Device memory that adapters on the shelf may take. Beyond it those that were used least recently
                wait in the host's memory.
        """
        self._adapters, self._parameters, self._optimizer = adapters, parameters, optimizer
        self._device, self._room_bytes = device, room_bytes
        self._shelved: OrderedDict[str, Shelved] = OrderedDict()
        self._in_place = POLICY

    def add(self, name: str, shape: AdapterShape) -> None:
        """Draw a new one, onto the shelf.

        Raises:
            UsageError: There is one of this name, or it is larger than what is in place.
        """
        if name in self._shelved or name == self._in_place:
            raise UsageError(f"there is an adapter {name!r}", fix="remove it first, or choose another name")
        drawn = self._adapters.drawn(shape)
        weights = {key: _part(parameter, drawn[key]).to(self._device) for key, parameter in self._parameters.items()}
        with torch.random.fork_rng():
            torch.manual_seed(shape.seed)
            self._shelve(name, Shelved(shape, weights, random_state()))

    def use(self, name: str, gathered: Gathered) -> Gathered:
        """Put one in place.

        Args:
            name: Of it.
            gathered: Gradients of the one that is in place.

        Returns:
            Gradients that it had.
        """
        if name == self._in_place:
            return gathered
        self._require(name)
        self._shelve(self._in_place, self._taken(gathered))
        return self._put(name)

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """Take saved factors into the one in place; its optimizer begins anew."""
        saved = self._adapters.read(folder)
        for name, parameter in self._parameters.items():
            local(parameter.detach()).copy_(_part(parameter, saved[name]))
        self._optimizer.restart(0)
        self._optimizer.clear_gradients()

    def remove(self, name: str, gathered: Gathered) -> Gathered:
        """Forget one, as :meth:`use` does what follows."""
        if name == POLICY:
            raise UsageError("the adapter of policy.lora stays", fix="remove those that were added")
        if name == self._in_place:
            return self._put(POLICY)
        self._require(name)
        del self._shelved[name]
        return gathered

    def _require(self, name: str) -> None:
        if name not in self._shelved:
            names = ", ".join(sorted([*self._shelved, self._in_place]))
            raise UsageError(f"there is no adapter {name!r}", fix=f"add it first; there are {names}")

    @torch.no_grad()
    def _taken(self, gathered: Gathered) -> Shelved:
        """A copy of what is in place."""
        optimizer = self._optimizer
        return Shelved(
            self._adapters.shape,
            {name: local(parameter.detach()).clone() for name, parameter in self._parameters.items()},
            random_state(),
            {name: local(tensor).clone() for name, tensor in optimizer.tensors().items()},
            dict(optimizer.gathered()),
            gathered,
            optimizer.steps,
            optimizer.rate_scale,
        )

    @torch.no_grad()
    def _put(self, name: str) -> Gathered:
        found, optimizer = self._shelved.pop(name), self._optimizer
        found.move(self._device)
        self._adapters.shape = found.shape
        for key, parameter in self._parameters.items():
            local(parameter.detach()).copy_(found.weights[key])
        if found.moments:
            for key, tensor in optimizer.allocate(found.moments.keys(), found.steps).items():
                local(tensor).copy_(found.moments[key])
        else:
            optimizer.restart(found.steps)
        optimizer.put_gradients(found.gradients)
        optimizer.rate_scale = found.rate_scale
        restore_random_state(found.random)
        self._in_place = name
        return found.gathered

    def _shelve(self, name: str, adapter: Shelved) -> None:
        """The last is the one that was used most recently."""
        self._shelved[name] = adapter
        if self._device == "cpu":
            return
        here = 0
        for other in reversed(self._shelved.values()):
            here += other.nbytes
            if here > self._room_bytes:
                other.move("cpu")


def _part(parameter: nn.Parameter, drawn: Tensor) -> Tensor:
    """This rank's part of a factor."""
    starts, sizes = offsets(parameter), local(parameter.detach()).shape
    return drawn[tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))].clone()
