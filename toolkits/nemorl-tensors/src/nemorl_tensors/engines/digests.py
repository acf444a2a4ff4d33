"""Digests of weights: one number per tensor that any layout of the same weights has, computed where they lie.

A digest is a sum over a tensor's words, each times an odd number that belongs to its place, modulo 2^64. Sums do not
care how a tensor is cut: the parts that ranks hold are digested where they are and added up (:func:`joined`). A changed
word always changes the sum, for an odd factor loses no bit of it; two words in each other's place change it unless they
differ in their highest bit alone. It is no signature: whoever wants to can make weights with a given digest.

# R = elements of the leading dimensions, W = words of the last one
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from typing import Any

import torch
from nemorl.weights import Digest, Digests, Export
from torch import Tensor

WORD_TYPES = ((8, torch.int64), (4, torch.int32), (2, torch.int16), (1, torch.uint8))
"""Bytes of a word: as many as divide the last dimension of the whole tensor."""
CHUNK_WORDS = 2**23
"""Products that a GPU, which has no product of integer matrices, holds at a time: 64 MiB."""
_MULTIPLIERS = 0x9E3779B97F4A7C15 - 2**64, 0xBF58476D1CE4E5B9 - 2**64
"""Of SplitMix64 (Steele, Lea and Flood 2014), as signed numbers."""


@dataclass(frozen=True, slots=True)
class PartDigest:
    """The sum over one box of a tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    """Of the whole tensor"""
    offsets: tuple[int, ...]
    """Where the box begins"""
    sizes: tuple[int, ...]
    value: int


def digest(tensor: Tensor) -> Digest:
    """Of a whole tensor."""
    return digests({"": tensor})[""]


@torch.no_grad()
def digests(tensors: Mapping[str, Tensor]) -> dict[str, Digest]:
    """Of whole tensors, read from their device once."""
    values = numbers([box_sum(tensor, tuple(tensor.shape), (0,) * tensor.ndim) for tensor in tensors.values()])
    found = zip(tensors.items(), values, strict=True)
    return {name: Digest(dtype_name(tensor), tuple(tensor.shape), value) for (name, tensor), value in found}


def digested(export: Export) -> tuple[Export, Digests]:
    """An export that is digested as it goes, and the digests of all that it has yielded so far (``Digested``)."""
    found = Digests()

    def through() -> Iterator[Mapping[str, Tensor]]:
        for bucket in export():
            start_s = time.perf_counter()
            found.update(digests(bucket))
            found.seconds += time.perf_counter() - start_s
            yield bucket

    return through, found


@torch.no_grad()
def box_sum(values: Tensor, shape: Sequence[int], offsets: Sequence[int]) -> Tensor:
    """The part of a tensor's digest that a box of it has: int64, without dimensions, on the box's device.

    Args:
        values: The box.
        shape: Of the whole tensor.
        offsets: Where the box begins.

    Raises:
        ValueError: The box is cut within a word.
    """
    if values.ndim == 0:
        values, shape, offsets = values[None], (1,), (0,)
    if not values.numel():
        return torch.zeros((), dtype=torch.int64, device=values.device)
    itemsize = values.dtype.itemsize
    size, word = next((size, word) for size, word in WORD_TYPES if shape[-1] * itemsize % size == 0)
    if offsets[-1] * itemsize % size or values.shape[-1] * itemsize % size:
        raise ValueError(f"a box at {tuple(offsets)} of {tuple(values.shape)} elements is cut within a word")
    values = values.detach().contiguous()
    if values.storage_offset() * itemsize % size:
        values = values.clone()
    words = values.view(torch.uint8).view(word) if word != torch.uint8 else values.view(torch.uint8)
    first, device = offsets[-1] * itemsize // size, values.device
    last = factors(values.ndim - 1, first + words.shape[-1], device)[first:]
    sums = _row_sums(words.reshape(-1, words.shape[-1]), last)  # [R]
    leading = [
        factors(dimension, offsets[dimension] + length, device)[offsets[dimension] :]
        for dimension, length in enumerate(values.shape[:-1])
    ]
    if not leading:
        return sums.sum()
    of_rows = reduce(lambda left, right: (left[:, None] * right).reshape(-1), leading)
    return (sums * of_rows).sum()


def _row_sums(words: Tensor, factor: Tensor) -> Tensor:
    """[R] sums of words [R, W] times factors [W], modulo 2^64."""
    if words.dtype == torch.int64 and words.device.type == "cpu":
        return torch.mv(words, factor)
    rows = max(1, CHUNK_WORDS // words.shape[-1])
    return torch.cat([(part.to(torch.int64) * factor).sum(1) for part in torch.split(words, rows)])


def factors(dimension: int, count: int, device: torch.device) -> Tensor:
    """The odd numbers [count] of the first places along a dimension."""
    return _factors(dimension, 1 << (count - 1).bit_length(), device)[:count]


@lru_cache(maxsize=256)
def _factors(dimension: int, count: int, device: torch.device) -> Tensor:
    first, second = _MULTIPLIERS
    mixed = (torch.arange(1, count + 1, dtype=torch.int64, device=device) + (dimension << 40)) * first
    mixed = (mixed ^ (mixed >> 29)) * second
    return (mixed ^ (mixed >> 32)) | 1


def numbers(sums: Sequence[Tensor]) -> list[int]:
    """Sums as numbers from 0 to 2^64 - 1; a device is waited for once."""
    found: list[int] = [0] * len(sums)
    places: dict[torch.device, list[int]] = defaultdict(list)
    for place, value in enumerate(sums):
        places[value.device].append(place)
    for on_device in places.values():
        for place, value in zip(on_device, torch.stack([sums[place] for place in on_device]).tolist(), strict=True):
            found[place] = value % 2**64
    return found


Box = tuple[str, tuple[int, ...], tuple[int, ...], Tensor]
"""Name and shape of a tensor, where a box of it begins, and its values."""


@torch.no_grad()
def part_digests(boxes: Iterable[Box]) -> list[PartDigest]:
    """Of boxes of tensors."""
    kept = list(boxes)
    values = numbers([box_sum(values, shape, offsets) for _, shape, offsets, values in kept])
    return [
        PartDigest(name, dtype_name(box), tuple(shape), tuple(offsets), tuple(box.shape), value)
        for (name, shape, offsets, box), value in zip(kept, values, strict=True)
    ]


def joined(parts: Iterable[PartDigest]) -> dict[str, Digest]:
    """Digests of tensors that several hold in parts. A box that several hold counts once; where their values differ,
    each counts, so that the sum is nobody's. A sum that lacks a box is that of no tensor either."""
    boxes: dict[str, dict[tuple[Any, ...], PartDigest]] = defaultdict(dict)
    for part in parts:
        boxes[part.name][part.offsets, part.sizes, part.value] = part
    found: dict[str, Digest] = {}
    for name, by_box in boxes.items():
        first = next(iter(by_box.values()))
        value = sum(part.value for part in by_box.values()) % 2**64
        found[name] = Digest(first.dtype, first.shape, value)
    return found


def dtype_name(tensor: Tensor) -> str:
    """torch's name of a tensor's dtype, without ``torch.``"""
    return str(tensor.dtype).removeprefix("torch.")
