"""The policy's weights as others read them: whole tensors on rank 0, or the pieces that each rank has.

Both carry the names and the form of published checkpoints, adapters merged. Whole tensors are put together one by one,
which every rank takes part in. Pieces are this rank's own memory; together they lie in all ranks exactly once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from nemorl_tensors.engines.boxes import Box, Offsets, ViewBox
from nemorl_tensors.engines.model_folder import write_weights
from nemorl_tensors.engines.pieces import Piece
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from nemorl_dtensor.model_lora import plain_name
from nemorl_dtensor.ranks import local, offsets, on_device, own_memory, whole
from nemorl_dtensor.sharded_weights import saved_tensors

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from nemorl_dtensor.model_lora import Adapters
    from nemorl_dtensor.published_names import PublishedNames


class ExportedWeights:
    """The weights of one model, as they are whenever they are asked for."""

    def __init__(self, model: PreTrainedModel, names: PublishedNames, adapters: Adapters | None, rank: int) -> None:
        """
        Args:
            model: Sharded or whole.
            names: Of its published checkpoints.
            adapters: What is merged into the weights.
            rank: Of this process.
        """
        self._model, self._names, self._adapters, self._rank = model, names, adapters, rank
        self._cuts: dict[str, list[_Cut]] = {}
        self._kept: dict[str, _Kept] = {}

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Whole tensors as published; one that has two names has the first. Collective where the model is sharded."""
        return self._names.published((name, whole(tensor.detach())) for name, tensor in self._merged())

    def pieces(self) -> Iterator[Piece]:
        """The pieces of the published tensors that this rank has and is the one to send. Collective."""
        views = self._views
        in_other_form: list[tuple[str, Tensor]] = []
        for turn, (name, tensor) in enumerate(self._merged()):
            if name not in views:
                in_other_form.append((name, tensor))
                continue
            kept = self._kept.get(name)
            if kept is not None and kept.holds(tensor):
                yield from kept.pieces
                continue
            if name not in self._cuts:  # they stay for the life of the model
                self._cuts[name] = list(_cuts(tensor, views[name])) if _sends(tensor, turn, self._rank) else []
            found = [cut.of(tensor) for cut in self._cuts[name]]
            if isinstance(tensor, nn.Parameter):  # the model's own: what adapters were merged into is not to stay
                memory = own_memory(tensor)
                self._kept[name] = _Kept(memory, memory.data_ptr(), found)
            yield from found
        # What conversions copy is put together on rank 0, tensor by tensor.
        for name, tensor in self._names.published((name, whole(tensor.detach())) for name, tensor in in_other_form):
            if self._rank == 0:
                yield Piece.whole(name, tensor)

    def _merged(self) -> Iterator[tuple[str, Tensor]]:
        """The plain model's tensors as they are in memory, sharded as they are there."""
        for name, owner, attribute in self._saved:
            tensor = on_device(getattr(owner, attribute))
            found = self._adapters.merged(name, tensor) if self._adapters else tensor
            if found is not None:
                yield plain_name(name), found

    @cached_property
    def _saved(self) -> list[tuple[str, nn.Module, str]]:
        """The tensors that make the model: names, and where they are found."""
        parts = ((name, *name.rpartition(".")[::2]) for name, _ in saved_tensors(self._model))
        return [(name, self._model.get_submodule(owner), attribute) for name, owner, attribute in parts]

    @cached_property
    def _views(self) -> dict[str, list[tuple[str, tuple[int, ...], ViewBox]]]:
        """Published tensors that are boxes of one in memory, by its name: their names, shapes and places."""
        shapes: dict[str, tuple[int, ...]] = {}
        for name, tensor in saved_tensors(self._model):
            found = self._adapters.merged_shape(name, tensor) if self._adapters else tuple(tensor.shape)
            if found is not None:
                shapes[plain_name(name)] = found
        return self._names.views(shapes)


def _sends(tensor: Tensor, turn: int, rank: int) -> bool:
    """Whether this rank is the one that sends its part of a tensor: those that hold copies of a part take turns."""
    if not isinstance(tensor, DTensor):
        return rank == 0
    coordinates = tensor.device_mesh.get_coordinate()
    assert coordinates is not None, "every rank is in the mesh"
    copy, copies = 0, 1
    for axis, placement in enumerate(tensor.placements):
        if isinstance(placement, Replicate):
            copy, copies = (
                copy * tensor.device_mesh.size(axis) + coordinates[axis],
                copies * tensor.device_mesh.size(axis),
            )
    return copy == turn % copies


@dataclass(frozen=True, slots=True)
class _Kept:
    """The pieces of a parameter, which are those of the next version too as long as it stays where it is."""

    memory: Tensor
    address: int
    pieces: list[Piece]

    def holds(self, tensor: Tensor) -> bool:
        memory = own_memory(tensor)
        return memory is self.memory and memory.data_ptr() == self.address


@dataclass(frozen=True, slots=True)
class _Cut:
    """One published piece as a part of what this rank holds of a tensor."""

    name: str
    shape: tuple[int, ...]
    offsets: Offsets
    place: ViewBox
    held: tuple[slice, ...] | None
    """``None``: all of it"""

    def of(self, tensor: Tensor) -> Piece:
        part = local(tensor).detach()
        values = part if self.held is None else part[self.held]
        return Piece(self.name, self.shape, self.offsets, self.place.as_view(values))


def _cuts(tensor: Tensor, views: list[tuple[str, tuple[int, ...], ViewBox]]) -> Iterator[_Cut]:
    held = Box(offsets(tensor), tuple(local(tensor).shape))
    for name, shape, place in views:
        common = held.common(place.box)
        if common is not None:
            cut = None if common == held else common.slices(held.starts)
            yield _Cut(name, shape, place.in_view(common).starts, place, cut)


def save_pretrained(path: Path, model: PreTrainedModel, tensors: Iterable[tuple[str, Tensor]], rank: int) -> None:
    """Write ``model`` without a tokenizer. Collective where it is spread over ranks; rank 0 writes.

    Args:
        path: Created if needed.
        model: The policy.
        tensors: Its weights under the names of published checkpoints, each put together as it is asked for.
        rank: Of this process.
    """
    if rank > 0:
        for _ in tensors:
            pass
        return
    path.mkdir(parents=True, exist_ok=True)
    config = deepcopy(model.config)
    config.architectures = [type(model).__name__.removeprefix("FSDP")]  # FSDP2 renames the class
    config.dtype = model.dtype
    vars(config).pop("quantization_config", None)  # what is written is decoded
    config.save_pretrained(path)
    if model.can_generate() and model.generation_config is not None:
        model.generation_config.save_pretrained(path)
    write_weights(path, tensors)
