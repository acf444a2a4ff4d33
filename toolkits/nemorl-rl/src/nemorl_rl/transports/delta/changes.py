"""The difference of two tensors of one dtype and shape as few bytes, and its application.

The bits of both are xored, and the bytes of the result are sorted by their place within an element: plane 0 has the
lowest byte of each. An update that moves elements by a unit in the last place fills plane 0 thinly and others hardly at
all; one of float32 fills the lower planes and leaves the signs and exponents. Each plane is written in the form that
takes the fewest bytes, before Huffman coding: where it is not zero as gaps or as a bitmap, and these bytes; or all of
it. Applied twice, a difference does nothing: it leads from the new tensor back to the old one.

# N = elements of a tensor, C = elements that differ in a plane
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Words = np.ndarray[Any, Any]
"""Elements as unsigned numbers of their size"""
Form = Literal["same", "gaps1", "gaps2", "bitmap", "all"]
"""How the places of a plane's changed bytes are written. ``gaps1``, ``gaps2``: elements skipped before each, in units
of one or two bytes, of which the largest says that the next adds to it."""

GAP_TYPES: dict[str, np.dtype[np.unsignedinteger[Any]]] = {"gaps1": np.dtype(np.uint8), "gaps2": np.dtype("<u2")}
WORD_BYTES = (8, 4, 2, 1)
TRIAL_BYTES = 2**16
"""Of the beginning of a run of bytes, packed to see whether it pays."""
WORTH = 0.9
"""A share that packed bytes must stay below."""
_HEAD = struct.Struct("<BQ")
"""Before a run of bytes: whether they are packed, and how many they are unpacked."""


class DamageError(Exception):
    """A message, or the bits that it was applied to, are not what they should be; says which. Among both ends only."""


@dataclass(frozen=True, slots=True)
class Plane:
    """One byte of each element, xored."""

    form: Form
    changed: int
    """C"""
    places: bytes = b""
    values: bytes = b""
    """[C], or [N] of the form ``all``"""

    @property
    def nbytes(self) -> int:
        """On its way."""
        return len(self.places) + len(self.values)


def changes(old: Bytes, new: Bytes, itemsize: int) -> list[Plane]:
    """What leads from one tensor to another, plane by plane; ``old`` becomes ``new``.

    Args:
        old: Bytes of a tensor, [N * itemsize], which are overwritten.
        new: As many of another.
        itemsize: Bytes of an element.
    """
    size = next(size for size in WORD_BYTES if itemsize % size == 0)
    old_words, new_words = old.view(f"<u{size}"), new.view(f"<u{size}")
    places = np.flatnonzero(old_words != new_words)
    if 2 * len(places) > len(old_words):  # more than half: passes over all of it are faster than lists of places
        xored = old_words ^ new_words
        np.copyto(old, new)
        return [_dense(xored.view(np.uint8)[plane::size]) for plane in range(size)]
    values = new_words[places]
    xored = values ^ old_words[places]
    old_words[places] = values
    return [_sparse(xored, places, len(old_words), plane) for plane in range(size)]


def _dense(values: Bytes) -> Plane:
    """A plane [N] in which much has changed."""
    places = np.flatnonzero(values)
    if 8 * len(places) < 7 * len(values):
        return _written(places, values[places], len(values))
    return Plane("all", len(places), b"", _packed(values.tobytes()))


def _sparse(xored: Words, places: Words, count: int, plane: int) -> Plane:
    """A plane of the changed elements' words at these places out of N."""
    values = (xored >> (8 * plane)).astype(np.uint8) if plane else xored.astype(np.uint8)
    mine = np.flatnonzero(values)
    return _written(places[mine], values[mine], count)


def _written(places: Words, values: Bytes, count: int) -> Plane:
    changed = len(places)
    if not changed:
        return Plane("same", 0)
    gaps = np.diff(places, prepend=-1) - 1
    sizes: dict[Form, int] = {"bitmap": -(-count // 8)}
    for form, kind in GAP_TYPES.items():
        most = np.iinfo(kind).max
        sizes[form] = kind.itemsize * (changed + int((gaps // most).sum()))  # type: ignore[index]
    form = min(sizes, key=lambda each: sizes[each])
    if form == "bitmap":
        mask = np.zeros(count, dtype=bool)
        mask[places] = True
        written = np.packbits(mask).tobytes()
    else:
        written = _gap_bytes(gaps, GAP_TYPES[form])
    return Plane(form, changed, _packed(written), _packed(values.tobytes()))


def _gap_bytes(gaps: Words, kind: np.dtype[np.unsignedinteger[Any]]) -> bytes:
    """
    >>> list(_gap_bytes(np.array([3, 0, 255, 600]), np.dtype("u1")))
    [3, 0, 255, 0, 255, 255, 90]
    """
    most = np.iinfo(kind).max
    full = gaps // most
    found = np.full(len(gaps) + int(full.sum()), most, dtype=kind)
    found[np.cumsum(full + 1) - 1] = gaps - full * most
    return found.tobytes()


def apply(planes: list[Plane], target: Bytes, itemsize: int) -> None:
    """Xor planes into the bytes of a tensor, in place.

    Raises:
        DamageError: They are not of such a tensor.
    """
    size = next(size for size in WORD_BYTES if itemsize % size == 0)
    if len(planes) != size:
        raise DamageError(f"{len(planes)} planes for elements of {itemsize} bytes")
    for number, plane in enumerate(planes):
        own = target[number::size]
        if plane.form == "all":
            own ^= _unpacked(plane.values, len(own))
        elif plane.form != "same":
            places = _places(plane, len(own))
            own[places] ^= _unpacked(plane.values, plane.changed)


def _places(plane: Plane, count: int) -> Words:
    """[C] of the changed bytes among N, in their order."""
    if plane.form == "bitmap":
        bits = _unpacked(plane.places, -(-count // 8))
        places = np.flatnonzero(np.unpackbits(bits, count=count))
    elif plane.form in GAP_TYPES:
        kind = GAP_TYPES[plane.form]
        raw = _unpacked(plane.places, None, most=kind.itemsize * (plane.changed + count))
        if len(raw) % kind.itemsize:
            raise DamageError(f"{len(raw)} bytes of gaps")
        gaps = raw.view(kind)
        ends = gaps != np.iinfo(kind).max
        places = np.cumsum(gaps, dtype=np.int64)[ends]
        places += np.arange(len(places))
    else:
        raise DamageError(f"an unknown form {plane.form!r}")
    if len(places) != plane.changed or (plane.changed and places[-1] >= count):
        raise DamageError(f"{len(places)} places instead of {plane.changed}, among {count}")
    return places


def _packed(data: bytes) -> bytes:
    """Huffman-coded where that pays: bytes of small changes have few values, and no repetitions worth a search."""
    if len(_deflated(data[:TRIAL_BYTES])) <= WORTH * min(len(data), TRIAL_BYTES):
        return _HEAD.pack(1, len(data)) + _deflated(data)
    return _HEAD.pack(0, len(data)) + data


def _deflated(data: bytes) -> bytes:
    coder = zlib.compressobj(1, zlib.DEFLATED, -zlib.MAX_WBITS, 9, zlib.Z_HUFFMAN_ONLY)
    return coder.compress(data) + coder.flush()


def _unpacked(data: bytes, size: int | None, most: int = 0) -> Bytes:
    """Bytes that :func:`_packed` was given: as many as ``size`` says, or up to ``most``."""
    if len(data) < _HEAD.size:
        raise DamageError(f"{len(data)} bytes are no run of bytes")
    is_packed, told = _HEAD.unpack_from(data)
    if (size is not None and told != size) or (size is None and told > most):
        raise DamageError(f"a run of {told} bytes instead of {most if size is None else size}")
    found = data[_HEAD.size :]
    if is_packed:
        try:
            found = zlib.decompressobj(-zlib.MAX_WBITS).decompress(found, told + 1)
        except zlib.error as error:
            raise DamageError(f"packed bytes do not unpack: {error}") from error
    if len(found) != told:
        raise DamageError(f"{len(found)} bytes instead of {told}")
    return np.frombuffer(found, dtype=np.uint8)
