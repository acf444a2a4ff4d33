"""Checkpoints of two runs, tensor by tensor, in pieces: neither model is ever in memory as a whole.

The header of a safetensors file says where each tensor lies, so the bytes are compared where they are, and only those
that differ are read as numbers. No torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nemorl_insight.diff.stages import Point

PIECE_BYTES = 16 * 2**20
"""Of each tensor, in memory at a time."""
HEADER_BYTES = 100 * 2**20
"""Longest header that the format allows."""
NUMPY: Mapping[str, str] = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1",
    "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "u1", "BOOL": "?", "BF16": "<u2",
}  # fmt: skip
"""How numpy reads each type; bfloat16 as the upper half of a float32. Others are compared as bytes."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a safetensors file."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    size: int
    """Bytes from ``start`` on."""

    @property
    def form(self) -> str:
        """Type and shape."""
        return f"{self.dtype} {list(self.shape)}"

    def piece(self, offset: int) -> np.ndarray[Any, Any]:
        """[bytes] uint8 from ``offset`` on, at most ``PIECE_BYTES``."""
        count = min(PIECE_BYTES, self.size - offset)
        return np.fromfile(self.file, np.uint8, count, offset=self.start + offset)

    def numbers(self, piece: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """The values that a piece holds, as float64; its bytes for a type that numpy does not have."""
        if self.dtype not in NUMPY:
            return piece.astype(np.float64)
        values = piece.view(NUMPY[self.dtype])
        if self.dtype == "BF16":
            values = (values.astype(np.uint32) << 16).view("<f4")
        return values.astype(np.float64)


def stored_tensors(file: Path) -> list[StoredTensor]:
    """The tensors of a file in the order in which they lie there.

    Raises:
        ValueError, OSError: it is no safetensors file, or is cut.
    """
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if not 0 < length <= HEADER_BYTES:
            raise ValueError(f"{file} is no safetensors file")
        header = json.loads(stream.read(length))
    size = file.stat().st_size
    found = []
    try:
        for name, entry in header.items():
            if name != "__metadata__":
                start, stop = (8 + length + offset for offset in entry["data_offsets"])
                if stop > size:
                    raise ValueError(f"{file} is cut: {name} ends at byte {stop} of {size}")
                found.append(StoredTensor(name, file, entry["dtype"], tuple(entry["shape"]), start, stop - start))
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{file} has a damaged header") from error
    return sorted(found, key=lambda tensor: tensor.start)


@dataclass(frozen=True)
class TensorDifference:
    """A tensor that differs."""

    name: str
    """Of its folder in the checkpoint and of the tensor: ``policy/model: lm_head.weight``."""
    elements: int
    differing: int
    largest: float
    """Absolute difference of two elements."""
    place: int
    """Of the first element that differs, in the flat tensor."""
    first: float
    second: float

    @property
    def point(self) -> Point:
        detail = f"{self.differing} of {self.elements} elements differ, by at most {self.largest:.3g}"
        return Point(self.name, self.first, self.second, detail=f"element {self.place}; {detail}")


@dataclass(frozen=True)
class CheckpointPair:
    """The checkpoints of two runs at one step."""

    first: Path
    second: Path
    tolerance: float

    def lacking(self) -> str | None:
        """Why their weights cannot be set beside one another; ``None`` where they can."""
        names = [{file.relative_to(path).as_posix() for file in _files(path)} for path in (self.first, self.second)]
        if names[0] == names[1]:
            return None
        only = sorted(names[0] ^ names[1])
        return f"their files differ ({only[0]} is in one alone): saved by another backend or number of workers"

    def differences(self) -> Iterator[TensorDifference]:
        """Every tensor that differs: those of the models before those of the optimizers.

        Raises:
            ValueError, OSError: a file is damaged.
        """
        for file in _files(self.first):
            relative = file.relative_to(self.first)
            ones, others = (
                {tensor.name: tensor for tensor in stored_tensors(place / relative)}
                for place in (self.first, self.second)
            )
            for name in {**ones, **others}:
                called = f"{relative.parent.as_posix()}: {name}"
                found = self._compared(called, ones.get(name), others.get(name))
                if found is not None:
                    yield found

    def _compared(self, name: str, one: StoredTensor | None, other: StoredTensor | None) -> TensorDifference | None:
        if one is None or other is None or one.form != other.form:
            forms = ("missing" if tensor is None else tensor.form for tensor in (one, other))
            raise ValueError("{} is {} in one checkpoint, {} in the other".format(name, *forms))
        elements = int(np.prod(one.shape, dtype=np.int64))
        differing, largest, where = 0, 0.0, None
        for offset in range(0, one.size, PIECE_BYTES):
            pieces = one.piece(offset), other.piece(offset)
            if np.array_equal(*pieces):
                continue
            values = one.numbers(pieces[0]), other.numbers(pieces[1])
            unlike = unequal(*values, self.tolerance)
            if not unlike.any():
                continue
            differing += int(unlike.sum())
            with np.errstate(invalid="ignore"):
                largest = max(largest, float(np.nanmax(np.abs(values[0] - values[1])[unlike], initial=0.0)))
            if where is None:
                at = int(unlike.argmax())
                before = offset * elements // one.size
                where = before + at, float(values[0][at]), float(values[1][at])
        return None if where is None else TensorDifference(name, elements, differing, largest, *where)


def _files(checkpoint: Path) -> list[Path]:
    """The safetensors files of a checkpoint but for those of random generators, models first."""
    found = [file for file in checkpoint.rglob("*.safetensors") if not file.name.startswith("rng")]
    return sorted(found, key=lambda file: ("optimizer" in file.relative_to(checkpoint).parts, str(file)))


def is_equal(first: Any, second: Any, tolerance: float) -> bool:
    """Equal, both NaN, or within ``tolerance`` of each other, relative to the larger one or absolute.

    >>> is_equal(1.0, 1.0 + 1e-7, 1e-6), is_equal(1.0, 1.0 + 1e-7, 0.0), is_equal(float("nan"), float("nan"), 0.0)
    (True, False, True)
    """
    if isinstance(first, float) and isinstance(second, float):
        if math.isnan(first) or math.isnan(second):
            return math.isnan(first) and math.isnan(second)
        return first == second or (tolerance > 0 and math.isclose(first, second, rel_tol=tolerance, abs_tol=tolerance))
    return bool(first == second)


def unequal(first: np.ndarray[Any, Any], second: np.ndarray[Any, Any], tolerance: float) -> np.ndarray[Any, Any]:
    """The same of two float arrays of one shape, element by element: True where they differ."""
    same = (first == second) | (np.isnan(first) & np.isnan(second))
    if tolerance > 0:
        with np.errstate(invalid="ignore"):  # infinity less infinity
            larger = np.maximum(np.maximum(np.abs(first), np.abs(second)), 1.0)
            same |= np.isfinite(larger) & (np.abs(first - second) <= tolerance * larger)
    return np.asarray(~same)
