"""Where the elements of a view lie in the tensor that it was made of.

A *box* is a range in every dimension. What slicing, splitting, selecting and transposing make of a tensor is a box of
it, its dimensions in another order; such a view is described by data alone, so that it can be read from parts of the
tensor that lie in different memories.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise

from torch import Tensor

Offsets = tuple[int, ...]

KEPT_ANSWERS = 4096
"""Geometry repeats from layer to layer and from version to version: answers are kept, of a few hundred bytes each."""


@dataclass(frozen=True, slots=True)
class Box:
    """A range in every dimension of a tensor.

    >>> Box((0, 4), (2, 4)).common(Box((1, 0), (3, 6)))
    Box(starts=(1, 4), sizes=(1, 2))
    """

    starts: Offsets
    sizes: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """All of a tensor."""
        return cls((0,) * len(shape), tuple(shape))

    def common(self, other: Box) -> Box | None:
        """The intersection of two boxes; ``None`` where it is empty."""
        pairs = list(zip(self.starts, self.sizes, other.starts, other.sizes, strict=True))
        starts = tuple(max(start, start_) for start, _, start_, _ in pairs)
        ends = tuple(min(start + size, start_ + size_) for start, size, start_, size_ in pairs)
        sizes = tuple(end - start for start, end in zip(starts, ends, strict=True))
        return Box(starts, sizes) if all(size > 0 for size in sizes) else None

    def slices(self, within: Offsets) -> tuple[slice, ...]:
        """The box as an index of a tensor whose first element is at ``within``."""
        places = zip(self.starts, self.sizes, within, strict=True)
        return tuple(slice(start - first, start - first + size) for start, size, first in places)


@dataclass(frozen=True)
class ViewBox:
    """A view as a box of its tensor."""

    box: Box
    dimensions: tuple[int | None, ...]
    """For each dimension of the view that of the tensor; ``None``: of size 1, in the view alone"""

    @cached_property
    def _has_same_dimensions(self) -> bool:
        return self.dimensions == tuple(range(len(self.box.sizes)))

    def as_view(self, part: Tensor) -> Tensor:
        """Elements of the tensor, cut out by a box within this one, with the dimensions that the view has."""
        if self._has_same_dimensions:
            return part
        kept = [dimension for dimension in self.dimensions if dimension is not None]
        dropped = [dimension for dimension in range(part.ndim) if dimension not in kept]
        ordered = part.permute(*kept, *dropped)
        for _ in dropped:
            ordered = ordered.squeeze(-1)
        for place, dimension in enumerate(self.dimensions):
            if dimension is None:
                ordered = ordered.unsqueeze(place)
        return ordered

    def in_view(self, box: Box) -> Box:
        """A box of the tensor, within this one, as a box of the view."""
        starts = tuple(0 if d is None else box.starts[d] - self.box.starts[d] for d in self.dimensions)
        return Box(starts, tuple(1 if d is None else box.sizes[d] for d in self.dimensions))


@dataclass(frozen=True, slots=True)
class Overlap:
    """Elements that a box of a tensor and a view of it have in common, as indices of both; ``None``: all of it."""

    in_box: tuple[slice, ...] | None
    in_view: tuple[slice, ...] | None


def view_box(view: Tensor, shape: Sequence[int]) -> ViewBox | None:
    """How a view lies in the contiguous tensor of this shape whose storage it shares.

    ``None`` where it is no box: its dimensions were merged or cut, or it steps over elements.

    >>> tensor = torch.empty(4, 6, device="meta")
    >>> view_box(tensor[1:3, 2:].t(), tensor.shape)
    ViewBox(box=Box(starts=(1, 2), sizes=(2, 4)), dimensions=(1, 0))
    """
    return _view_box(tuple(view.shape), view.stride(), int(view.storage_offset()), tuple(shape))


@lru_cache(maxsize=KEPT_ANSWERS)
def _view_box(
    sizes_of_view: tuple[int, ...], strides_of_view: tuple[int, ...], offset: int, shape: tuple[int, ...]
) -> ViewBox | None:
    strides = _strides(shape)
    starts, rest = [], offset
    for stride in strides:
        start, rest = divmod(rest, stride)
        starts.append(start)
    sizes = [1] * len(shape)
    dimensions: list[int | None] = []
    for size, stride in zip(sizes_of_view, strides_of_view, strict=True):
        if size == 1:
            dimensions.append(None)
            continue
        found = [d for d, own in enumerate(strides) if own == stride and shape[d] > 1 and d not in dimensions]
        if len(found) != 1 or starts[found[0]] + size > shape[found[0]]:
            return None
        dimensions.append(found[0])
        sizes[found[0]] = size
    if rest:
        return None
    return ViewBox(Box(tuple(starts), tuple(sizes)), tuple(dimensions))


@lru_cache(maxsize=KEPT_ANSWERS)
def overlap(place: ViewBox, starts: Offsets, sizes: tuple[int, ...]) -> Overlap | None:
    """The part of a view within a box of the tensor; ``None`` where it is empty.

    >>> overlap(ViewBox(Box((0, 2), (4, 2)), (1, 0)), (2, 0), (2, 6))
    Overlap(in_box=(slice(0, 2, None), slice(2, 4, None)), in_view=(slice(0, 2, None), slice(2, 4, None)))
    """
    box = Box(starts, sizes)
    common = box.common(place.box)
    if common is None:
        return None
    seen = place.in_view(common)
    return Overlap(
        None if common == box else common.slices(starts),
        None if common == place.box else seen.slices((0,) * len(seen.starts)),
    )


def _strides(shape: Sequence[int]) -> list[int]:
    """Of a contiguous tensor, in elements."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * max(size, 1))
    found = list(reversed(strides))[: len(shape)]
    assert all(left >= right for left, right in pairwise(found))
    return found
