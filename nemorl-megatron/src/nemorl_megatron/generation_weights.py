"""New weights for a generator with a model of its own: from Hugging Face tensors, in whatever buckets they come.

A model that lives with its trainer needs none of this: it reads the trainer's parameters.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from nemorl.errors import BackendError
from nemorl_rl.models.model_geometry import is_mtp_tensor
from nemorl_tensors.engines.digests import Box, joined, part_digests
from torch import Tensor

from nemorl_megatron.bridge.exchange import Exchange, global_names
from nemorl_megatron.bridge.sources import Tensors
from nemorl_megatron.bridge.tables import Weight, weights

if TYPE_CHECKING:
    from nemorl.weights import Digest, WeightHandle

    from nemorl_megatron.model import PolicyModel
    from nemorl_megatron.parallel import Parallel
    from nemorl_megatron.settings import Settings

EMBEDDING = "model.embed_tokens.weight"
TIED_HEAD = "lm_head.weight"
"""A tensor that some trainers send although it is the embedding again."""


class OwnWeights:
    """The parameters of a model that nobody else holds."""

    def __init__(self, model: Sequence[PolicyModel], settings: Settings, parallel: Parallel) -> None:
        """
        Args:
            model: This rank's pieces.
            settings: Of the whole model.
            parallel: This rank's place.
        """
        self._exchange = Exchange(settings, parallel)
        self._parameters = global_names(model, settings, parallel)
        self._stored = {weight.parameter: weight.stored for weight in weights(settings)}
        self._names = StoredNames(settings)

    def fill(self, handle: WeightHandle) -> None:
        """Copy every parameter from the tensors of ``handle``; each tensor is let go as soon as its parameter is full.

        Raises:
            BackendError: A tensor is missing, unknown or of another shape.
        """
        missing = dict(self._stored)
        waiting: dict[str, Tensor] = {}
        for bucket in handle.buckets():
            for name, tensor in bucket.items():
                waiting |= self._names.of(name, tensor)
            complete = [parameter for parameter, stored in missing.items() if waiting.keys() >= {*stored}]
            self._exchange.fill({parameter: self._parameters[parameter] for parameter in complete}, Tensors(waiting))
            for parameter in complete:
                for name in missing.pop(parameter):
                    del waiting[name]
        if missing:
            names = [name for stored in missing.values() for name in stored if name not in waiting]
            raise BackendError(
                f"the trainer sent no weights for {len(names)} tensors: {', '.join(names[:5])}",
                fix="export every parameter under its Hugging Face name",
            )

    def held_digests(self, names: Collection[str]) -> dict[str, Digest]:
        """Digests of the tensors that were sent under these names, from the places that they have in parameters."""
        return joined(part_digests(self._boxes(names)))

    def _boxes(self, names: Collection[str]) -> Iterator[Box]:
        for piece in self._exchange.pieces(self._parameters):
            for name, shape, first in self._names.sent_as(piece.name, piece.shape):
                if name in names:
                    ahead = len(shape) - len(piece.shape)
                    offsets = tuple(a + b for a, b in zip(first, (0,) * ahead + piece.offsets, strict=True))
                    yield name, shape, offsets, piece.values.reshape((1,) * ahead + piece.values.shape)


class StoredNames:
    """Trainers' names of the tensors of a model: as files do, or as transformers' models in memory do, which hold all
    experts of a layer in two tensors."""

    def __init__(self, settings: Settings) -> None:
        self._tied, self._layers = settings.tied, settings.layers
        self._stored: set[str] = set()
        self._routers: dict[str, str] = {}
        self._experts: dict[str, list[Weight]] = {}
        for weight in weights(settings):
            self._stored.update(weight.stored)
            mixture = f"model.layers.{weight.layer}.mlp"
            if weight.expert is not None:
                tensor = "gate_up_proj" if len(weight.stored) == 2 else "down_proj"
                self._experts.setdefault(f"{mixture}.experts.{tensor}", []).append(weight)
            elif weight.parameter.endswith("mlp.router.weight"):
                self._routers[f"{mixture}.gate.weight"] = weight.stored[0]

    def sent_as(self, stored: str, shape: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...], tuple[int, ...]]]:
        """The tensors by which trainers may have sent one of a file: names, shapes, and where it begins in them."""
        yield stored, shape, (0,) * len(shape)
        for name, experts in self._experts.items():
            for number, weight in enumerate(experts):
                if stored in weight.stored:
                    rows, columns = shape
                    whole = (len(experts), rows * len(weight.stored), columns)
                    yield name, whole, (number, rows * weight.stored.index(stored), 0)
        for name, other in self._routers.items():
            if other == stored:
                yield name, shape, (0,) * len(shape)
        if self._tied and stored == EMBEDDING:
            yield TIED_HEAD, shape, (0,) * len(shape)

    def of(self, name: str, tensor: Tensor) -> Mapping[str, Tensor]:
        """A tensor under the names that it has in files; its parts, where those hold it in parts.

        Raises:
            BackendError: The model has no such tensor.
        """
        if name in self._stored:
            return {name: tensor}
        if name in self._routers:
            return {self._routers[name]: tensor}
        experts = self._experts.get(name, [])
        if experts and len(experts) == len(tensor):
            return {
                stored: part
                for weight, expert in zip(experts, tensor, strict=True)
                for stored, part in zip(weight.stored, expert.chunk(len(weight.stored)), strict=True)
            }
        if (name == TIED_HEAD and self._tied) or is_mtp_tensor(name, self._layers):
            return {}
        raise BackendError(
            f"the trainer sent {name!r} of shape {list(tensor.shape)}, but the model has no such tensor",
            fix="train and generate with the same model_name, and export Hugging Face names",
        )
