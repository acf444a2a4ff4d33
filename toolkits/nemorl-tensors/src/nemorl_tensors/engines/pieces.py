"""Weights that nobody gathers: every rank makes its own pieces available, and a reader takes what it needs of them.

A rank of the trainer publishes the boxes of tensors that it holds (:class:`PieceSender`). Their places, of all ranks
together, make a :class:`SpreadHandle`, whose tensors (:class:`LazyWeight`) are only descriptions: slicing one reads
nothing, and copying one into memory reads the slice, from the ranks that have it. So an engine that spreads over
several devices loads on each what belongs there, and no process ever holds the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from nemorl.errors import BackendError
from nemorl.weights import WeightHandle, transport
from torch import Tensor
from torch.utils._pytree import tree_map_only

from nemorl_tensors.engines.boxes import Offsets, overlap, view_box
from nemorl_tensors.engines.buckets import in_buckets


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a tensor, held by one rank."""

    name: str
    """Hugging Face name of the tensor"""
    shape: tuple[int, ...]
    """Of the whole tensor"""
    offsets: Offsets
    """Where the box begins"""
    values: Tensor
    """May be the live parameter's memory"""

    @classmethod
    def whole(cls, name: str, tensor: Tensor) -> Piece:
        """All of a tensor."""
        return cls(name, tuple(tensor.shape), (0,) * tensor.ndim, tensor)


class Place(NamedTuple):
    """Where a published piece belongs. A tuple, for thousands are pickled with each version."""

    name: str
    shape: tuple[int, ...]
    offsets: Offsets


@dataclass(frozen=True, slots=True)
class RankPieces:
    """What one rank has published: plain data."""

    payload: Any
    """Of the transport"""
    places: Mapping[str, Place]
    """By the name under which the transport carries each piece"""


@runtime_checkable
class PublishesPieces(Protocol):
    """A training backend whose ranks send their own parts of the weights (capability ``weight_pieces``)."""

    def publish_pieces(self, transport: str) -> RankPieces:
        """Make this rank's part available. All ranks call it; their pieces together are what ``export_weights`` yields,
        every element once.

        Args:
            transport: Id of one that receivers map (``WeightTransportConfig.is_mapped``).
        """
        ...

    def withdraw_pieces(self) -> None:
        """Release what was published: everyone has read it."""
        ...


class PieceSender:
    """The sending end of a rank."""

    def __init__(self) -> None:
        self._transports: dict[str, Any] = {}

    @torch.no_grad()
    def publish(self, name: str, pieces: Callable[[], Iterable[Piece]]) -> RankPieces:
        """Make pieces available over a transport. What the version before this one published stays valid.

        Args:
            name: Id of the transport.
            pieces: Those of this rank.
        """
        if name not in self._transports:
            self._transports[name] = transport(name)
        places: dict[str, Place] = {}

        def named() -> Iterator[tuple[dict[str, Tensor], int]]:
            for piece in pieces():
                key = str(len(places))
                places[key] = Place(piece.name, piece.shape, piece.offsets)
                yield {key: piece.values}, piece.values.nbytes

        return RankPieces(self._transports[name].publish(lambda: in_buckets(named())), places)

    def close(self) -> None:
        """Release what was published."""
        for sender in self._transports.values():
            sender.close()
        self._transports = {}


@dataclass(frozen=True)
class SpreadHandle(WeightHandle):
    """One version of the policy's weights in pieces; its payload is a :class:`RankPieces` per rank."""

    def buckets(self) -> Iterator[Mapping[str, Tensor]]:
        """All tensors at once, as :class:`LazyWeight`.

        Raises:
            BackendError: the pieces do not make whole tensors.
        """
        receiver = transport(self.transport)
        found: dict[str, list[Piece]] = {}
        for rank in self.payload:
            for bucket in receiver.fetch(rank.payload):
                for key, values in bucket.items():
                    place = rank.places[key]
                    found.setdefault(place.name, []).append(Piece(place.name, place.shape, place.offsets, values))
        yield {name: lazy_weight(pieces) for name, pieces in found.items()}


def lazy_weight(pieces: Sequence[Piece]) -> LazyWeight:
    """The tensor that pieces make together.

    Raises:
        BackendError: they do not cover it exactly once.
    """
    first = pieces[0]
    held, whole = sum(piece.values.numel() for piece in pieces), torch.Size(first.shape).numel()
    if held != whole or any(piece.shape != first.shape for piece in pieces):
        raise BackendError(
            f"the ranks of the trainer published {held} elements of {first.name!r}, which has {whole}",
            fix="each element must be published by one rank: `export_pieces` of the training backend is wrong",
        )
    return LazyWeight(torch.empty(first.shape, dtype=first.values.dtype, device="meta"), tuple(pieces))


class LazyWeight(Tensor):
    """A tensor, or a view of one, whose values lie in pieces elsewhere and are read where they are copied to.

    Views of it are lazy too. Any other operation first reads all that it was given.
    """

    _view: Tensor
    """On the meta device, a view of a contiguous tensor of the whole shape"""
    _pieces: tuple[Piece, ...]
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, view: Tensor, pieces: tuple[Piece, ...]) -> LazyWeight:
        lazy: LazyWeight = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            view.shape,
            strides=view.stride(),
            storage_offset=view.storage_offset(),
            dtype=view.dtype,
            device=pieces[0].values.device,
        )
        return lazy

    def __init__(self, view: Tensor, pieces: tuple[Piece, ...]) -> None:
        self._view, self._pieces = view, pieces

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"LazyWeight({self._pieces[0].name!r}, shape={tuple(self.shape)}, in {len(self._pieces)} pieces)"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.copy_.default and isinstance(args[1], cls) and not isinstance(args[0], cls):
            args[1].read_into(args[0])
            return args[0]
        if func.is_view and isinstance(args[0], cls):
            pieces, made = args[0]._pieces, func(args[0]._view, *args[1:], **kwargs)
            return cls(made, pieces) if isinstance(made, Tensor) else [cls(view, pieces) for view in made]
        args, kwargs = tree_map_only(cls, cls.read, (args, dict(kwargs)))
        return func(*args, **kwargs)

    def read(self) -> Tensor:
        """A tensor of its own with the values."""
        values = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        self.read_into(values)
        return values

    @torch.no_grad()
    def read_into(self, target: Tensor) -> None:
        """Copy the values into a tensor that this one's shape broadcasts to, of any dtype, on any device."""
        place = view_box(self._view, self._pieces[0].shape)
        if place is None:
            target.copy_(self._whole().as_strided(self._view.shape, self._view.stride(), self._view.storage_offset()))
            return
        if target.shape != self.shape:
            target.copy_(self.read())
            return
        for piece in self._pieces:
            found = overlap(place, piece.offsets, tuple(piece.values.shape))
            if found is not None:
                values = piece.values if found.in_box is None else piece.values[found.in_box]
                (target if found.in_view is None else target[found.in_view]).copy_(place.as_view(values))

    def _whole(self) -> Tensor:
        """All of the tensor that this is a view of."""
        shape = self._pieces[0].shape
        return LazyWeight(torch.empty(shape, dtype=self.dtype, device="meta"), self._pieces).read()
