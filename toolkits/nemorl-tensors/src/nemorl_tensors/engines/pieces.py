"""Weights that nobody gathers: every rank makes its own pieces available, and a reader takes what it needs of them.

A rank of the trainer publishes the boxes of tensors that it holds (:class:`PieceSender`). Their places, of all ranks
together, make a :class:`SpreadHandle`, whose tensors (:class:`LazyWeight`) are only descriptions: slicing one reads
nothing, and copying one into memory reads the slice, from the ranks that have it. So an engine that spreads over
several devices loads on each what belongs there, and no process ever holds the model.
"""

from __future__ import annotations

import json
import operator
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain
from typing import Any, NamedTuple

import torch
from nemorl.errors import BackendError
from nemorl.weights import Digests, WeightHandle, transport
from torch import Tensor
from torch.utils._pytree import tree_map_only

from nemorl_tensors.engines.boxes import KEPT_ANSWERS, Offsets, ViewBox, overlap, view_box
from nemorl_tensors.engines.buckets import KeptBucket, in_buckets
from nemorl_tensors.engines.digests import PartDigest, joined, part_digests


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
    """Where a piece belongs. Its text is the name under which a transport carries the piece."""

    name: str
    shape: tuple[int, ...]
    offsets: Offsets

    @staticmethod
    @lru_cache(maxsize=KEPT_ANSWERS)
    def text(name: str, shape: tuple[int, ...], offsets: Offsets) -> str:
        """A place in one line.

        >>> Place.text("lm_head.weight", (4, 6), (2, 0))
        '["lm_head.weight", [4, 6], [2, 0]]'
        """
        return json.dumps([name, shape, offsets])

    @staticmethod
    @lru_cache(maxsize=KEPT_ANSWERS)
    def parse(text: str) -> Place:
        """The place that ``text`` was made of."""
        name, shape, offsets = json.loads(text)
        return Place(name, tuple(shape), tuple(offsets))


@dataclass(frozen=True, slots=True)
class RankPieces:
    """Pieces that one rank has published, as plain data."""

    payload: Any
    """Of the transport, which carries each piece under the text of its :class:`Place`"""
    digests: tuple[PartDigest, ...] | None = None
    """Of the pieces, where they were asked for"""
    digesting_s: float = 0.0


class PieceSender:
    """The sending end of a rank."""

    def __init__(self) -> None:
        self._transports: dict[str, Any] = {}

    @torch.no_grad()
    def publish(self, name: str, pieces: Callable[[], Iterable[Piece]], *, digests: bool = False) -> RankPieces:
        """Make pieces available over a transport. What the version before this one published stays valid.

        Args:
            name: Id of the transport.
            pieces: Those of this rank.
            digests: Of them, too.
        """
        if name not in self._transports:
            self._transports[name] = transport(name)

        def named() -> Iterator[tuple[dict[str, Tensor], int]]:
            for piece in pieces():
                yield {Place.text(piece.name, piece.shape, piece.offsets): piece.values}, piece.values.nbytes

        payload, start_s = self._transports[name].publish(lambda: in_buckets(named())), time.perf_counter()
        if not digests:
            return RankPieces(payload)
        found = part_digests((piece.name, piece.shape, piece.offsets, piece.values) for piece in pieces())
        return RankPieces(payload, tuple(found), time.perf_counter() - start_s)

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
        yield _joined([bucket for rank in self.payload for bucket in receiver.fetch(rank.payload)])


def spread_handle(transport: str, version: int, ranks: Sequence[RankPieces]) -> SpreadHandle:
    """The handle of what ranks have published, with the digests of whole tensors where they digested their pieces."""
    parts = [rank.digests for rank in ranks if rank.digests is not None]
    digests = Digests(joined(chain.from_iterable(parts))) if parts else None
    if digests is not None:
        digests.seconds = max(rank.digesting_s for rank in ranks)
    return SpreadHandle(transport, version, ranks, digests=digests)


def _joined(buckets: Sequence[Mapping[str, Tensor]]) -> Mapping[str, LazyWeight]:
    """The tensors that all pieces make together. Of buckets that a transport hands out again they are made once."""
    first, others = next(iter(buckets), {}), buckets[1:]
    if isinstance(first, KeptBucket) and first.made is not None:
        made: tuple[Sequence[Mapping[str, Tensor]], dict[str, LazyWeight]] = first.made
        if len(made[0]) == len(others) and all(map(operator.is_, made[0], others)):
            return made[1]
    found: dict[str, list[Piece]] = {}
    for bucket in buckets:
        for text, values in bucket.items():
            place = Place.parse(text)
            found.setdefault(place.name, []).append(Piece(*place, values))
    joined = {name: lazy_weight(pieces) for name, pieces in found.items()}
    if isinstance(first, KeptBucket):
        first.made = (others, joined)  # not itself among them: it is to be gone with its last holder
    return joined


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
    return LazyWeight(_View(torch.empty(first.shape, dtype=first.values.dtype, device="meta"), tuple(pieces)))


Copied = Callable[[Piece, "ViewBox | None", Tensor], None]
"""A piece of the tensor that was read, the place of what was read of it, and the memory that it was copied to."""
_watching: ContextVar[Copied | None] = ContextVar("watching", default=None)


@contextmanager
def watched_copies(copied: Copied) -> Iterator[None]:
    """Within it, each copy from a :class:`LazyWeight` into memory is told of once it is done."""
    token = _watching.set(copied)
    try:
        yield
    finally:
        _watching.reset(token)


class _View:
    """Where a tensor, or a view of one, lies in pieces. Found out once: of the next version the same is read."""

    def __init__(self, meta: Tensor, pieces: tuple[Piece, ...]) -> None:
        """
        Args:
            meta: On the meta device, a view of a contiguous tensor of the whole shape.
            pieces: Of that tensor.
        """
        self.meta, self.pieces = meta, pieces
        self._views: dict[tuple[Any, str, str], _View | list[_View]] = {}
        self.lazy: dict[tuple[Any, ...], tuple[LazyWeight, ...]] = {}
        """Of views that loaders ask for by name, what they were given"""

    @cached_property
    def parts(self) -> list[tuple[tuple[slice, ...] | None, Tensor]] | None:
        """Places in this view (``None``: all of it) and what lies there; ``None``: it is no box of its tensor."""
        place = view_box(self.meta, self.pieces[0].shape)
        if place is None:
            return None
        parts = []
        for piece in self.pieces:
            found = overlap(place, piece.offsets, tuple(piece.values.shape))
            if found is not None:
                values = piece.values if found.in_box is None else piece.values[found.in_box]
                parts.append((found.in_view, place.as_view(values)))
        return parts

    @cached_property
    def rows(self) -> tuple[list[int], list[Tensor]] | None:
        """Where the parts follow each other in the first dimension: how long each is there, and what lies there."""
        parts = [(place[0].start, values) for place, values in self.parts or () if place]
        if len(parts) < 2:
            return None
        found = [values for _, values in sorted(parts, key=lambda part: part[0])]
        sizes = [len(values) for values in found]
        shape = self.meta.shape
        is_all = sum(sizes) == shape[0] and all(values.shape[1:] == shape[1:] for values in found)
        return (sizes, found) if is_all else None

    def view(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> _View | list[_View]:
        """The result of an operation that makes views, on this tensor."""
        key = func, str(args), str(kwargs)
        if key not in self._views:
            made = func(self.meta, *args, **kwargs)
            one = isinstance(made, Tensor)
            self._views[key] = _View(made, self.pieces) if one else [_View(meta, self.pieces) for meta in made]
        return self._views[key]


class LazyWeight(Tensor):
    """A tensor, or a view of one, whose values lie in pieces elsewhere and are read where they are copied to.

    Views of it are lazy too. Any other operation first reads all that it was given.
    """

    _view: _View
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, view: _View) -> LazyWeight:
        meta = view.meta
        lazy: LazyWeight = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            meta.shape,
            strides=meta.stride(),
            storage_offset=meta.storage_offset(),
            dtype=meta.dtype,
            device=view.pieces[0].values.device,
        )
        return lazy

    def __init__(self, view: _View) -> None:
        self._view = view

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        pieces = self._view.pieces
        return f"LazyWeight({pieces[0].name!r}, shape={tuple(self.shape)}, in {len(pieces)} pieces)"

    def narrow(self, dim: int, start: int, length: int) -> Tensor:  # type: ignore[override]
        """As of any tensor."""
        return self._cut(Tensor.narrow, dim, int(start), length)[0]

    def chunk(self, chunks: int, dim: int = 0) -> tuple[Tensor, ...]:
        """As of any tensor."""
        return self._cut(Tensor.chunk, chunks, dim)

    def _cut(self, method: Any, *numbers: int) -> tuple[LazyWeight, ...]:
        """Views that a loader takes of every version: the same objects each time, past torch's dispatch, which takes
        longer than copying a small one does."""
        kept, key = self._view.lazy, (method, *numbers)
        if key not in kept:
            made = self._view.view(method, numbers, {})
            kept[key] = tuple(LazyWeight(view) for view in (made if isinstance(made, list) else [made]))
        return kept[key]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.copy_.default and isinstance(args[1], cls) and not isinstance(args[0], cls):
            args[1]._read_into(args[0])
            copied = _watching.get()
            if copied is not None and not args[0].is_meta:
                view = args[1]._view
                copied(view.pieces[0], view_box(view.meta, view.pieces[0].shape), args[0])
            return args[0]
        if func.is_view and isinstance(args[0], cls):
            made = args[0]._view.view(func, args[1:], kwargs)
            return cls(made) if isinstance(made, _View) else [cls(view) for view in made]
        args, kwargs = tree_map_only(cls, cls.read, (args, dict(kwargs)))
        return func(*args, **kwargs)

    def read(self) -> Tensor:
        """A tensor of its own with the values."""
        values = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        self._read_into(values)
        return values

    def _read_into(self, target: Tensor) -> None:
        """Copy the values into a tensor that this one's shape broadcasts to, of any dtype, on any device."""
        parts = self._view.parts
        if parts is None:
            meta = self._view.meta
            target.copy_(self._whole().as_strided(meta.shape, meta.stride(), meta.storage_offset()))
        elif target.shape != self.shape:
            target.copy_(self.read())
        elif self._view.rows is not None:
            sizes, rows = self._view.rows
            torch._foreach_copy_(target.split_with_sizes(sizes), rows)
        else:
            for place, values in parts:
                (target if place is None else target[place]).copy_(values)

    def _whole(self) -> Tensor:
        """All of the tensor that this is a view of."""
        pieces = self._view.pieces
        return LazyWeight(_View(torch.empty(pieces[0].shape, dtype=self.dtype, device="meta"), pieces)).read()
