"""Numbers: token ids, masks and log-probs of a sequence as an array that is used like the tuple it stands for.

A tuple of Python numbers costs 8 bytes of pointer and up to 32 of object a value; these cost 4 for a token id or a
log-prob and 1 for a mask, and are copied, pickled and laid end to end at the speed of memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar, cast, overload

import numpy
from nemorl import media

T = TypeVar("T", int, float, bool)
Array = numpy.ndarray[Any, numpy.dtype[Any]]

INT32_IDS = 2**31
"""Ids below it fit 4 bytes. Those of images and sounds (``nemorl.media``) do not."""


class Numbers(Sequence[T]):
    """Values of one sequence, equal to the tuple of the same values, and with the same hash.

    It is no instance of ``tuple``: ``json.dumps`` wants ``list(numbers)``. ``numpy.asarray`` of it copies nothing.

    Example:
        >>> ids = token_ids([5, 6, 7])
        >>> ids == (5, 6, 7), ids[1:], (4, *ids), ids.array.dtype.name
        (True, (6, 7), (4, 5, 6, 7), 'int32')
    """

    __slots__ = ("array",)

    def __init__(self, array: Array) -> None:
        self.array = array
        """[T], not to be written to"""

    def __len__(self) -> int:
        return len(self.array)

    @overload
    def __getitem__(self, place: int) -> T: ...
    @overload
    def __getitem__(self, place: slice) -> Numbers[T]: ...
    def __getitem__(self, place: int | slice) -> T | Numbers[T]:
        if isinstance(place, slice):
            return Numbers(self.array[place])
        value: T = self.array[place].item()
        return value

    def __iter__(self) -> Iterator[T]:
        return iter(self.array.tolist())

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Numbers):
            return numpy.array_equal(self.array, other.array)
        return tuple(self) == other if isinstance(other, tuple) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __add__(self, other: Sequence[T]) -> tuple[T, ...]:
        return tuple(self) + tuple(other) if isinstance(other, Numbers | tuple) else NotImplemented

    def __radd__(self, other: Sequence[T]) -> tuple[T, ...]:
        return tuple(other) + tuple(self) if isinstance(other, tuple) else NotImplemented

    def __mul__(self, times: int) -> tuple[T, ...]:
        return tuple(self) * times

    @property
    def declared(self) -> tuple[T, ...]:
        """This object, under the type that fields for tuples of numbers are declared with."""
        return cast("tuple[T, ...]", self)

    def count(self, value: Any) -> int:
        return int(numpy.count_nonzero(self.array == value))

    def index(self, value: Any, start: int = 0, stop: int | None = None) -> int:
        return tuple(self).index(value, *slice(start, stop).indices(len(self))[:2])

    def __contains__(self, value: object) -> bool:
        return value in tuple(self)

    def __repr__(self) -> str:
        return repr(tuple(self))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return numpy.array(self.array, dtype=dtype, copy=True) if copy else numpy.asarray(self.array, dtype=dtype)

    def __reduce__(self) -> tuple[Any, ...]:
        return Numbers, (numpy.ascontiguousarray(self.array),)  # which leaves a pickle of protocol 5 as a buffer


def token_ids(values: Sequence[int]) -> Numbers[int]:
    """Token ids as ``Numbers`` of int32, or of int64 where they show images or sounds."""
    if isinstance(values, Numbers):
        return values
    array = numpy.asarray(values, numpy.int64)
    return Numbers(array.astype(numpy.int32) if int(array.max(initial=0)) < INT32_IDS else array)


def text_ids(values: Sequence[int]) -> list[int]:
    """The ids that are tokens of the vocabulary, as :func:`nemorl.media.text_ids`; of int32 all are.

    Example:
        >>> text_ids(token_ids([5, 6]))
        [5, 6]
    """
    if isinstance(values, Numbers) and values.array.dtype == numpy.int32:
        ids: list[int] = values.array.tolist()
        return ids
    return media.text_ids(values)


def logprobs(values: Sequence[float]) -> Numbers[float]:
    """Log-probs as ``Numbers`` of float32, or of float64 where that would change any: engines compute float32, and
    some servers write decimals.

    Example:
        >>> logprobs([-0.5, -0.1]).array.dtype.name, logprobs([-0.5, -0.25]).array.dtype.name
        ('float64', 'float32')
    """
    if isinstance(values, Numbers):
        return values
    array = numpy.asarray(values, numpy.float64)
    with numpy.errstate(over="ignore"):
        rounded = array.astype(numpy.float32)
    return Numbers(rounded if numpy.array_equal(rounded, array) else array)


def joined(parts: Sequence[Numbers[T]]) -> Numbers[T]:
    """Sequences end to end as one."""
    return parts[0] if len(parts) == 1 else Numbers(numpy.concatenate([part.array for part in parts]))


def spread(values: Array, sizes: Sequence[int]) -> Array:
    """[N] each value as often as its size says. ``numpy.repeat`` takes a step for each of N, this one for each value.

    Example:
        >>> spread(numpy.array([0.5, 2.0]), [1, 2]).tolist()
        [0.5, 2.0, 2.0]
    """
    found, start = numpy.empty(sum(sizes), values.dtype), 0
    for value, size in zip(values, sizes, strict=True):
        found[start : start + size] = value
        start += size
    return found


def laid_out(rows: Sequence[Sequence[Any]], dtype: type[Any]) -> Array:
    """[N] the values of all rows end to end, whatever they are made of.

    Example:
        >>> laid_out([token_ids([5, 6]), (7,)], numpy.int64).tolist()
        [5, 6, 7]
    """
    if not any(isinstance(row, Numbers) for row in rows):
        return numpy.array([value for row in rows for value in row], dtype)
    found, start = numpy.empty(sum(map(len, rows)), dtype), 0
    for row in rows:
        found[start : start + len(row)] = row
        start += len(row)
    return found
