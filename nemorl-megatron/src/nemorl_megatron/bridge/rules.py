"""How stored tensors lie in a parameter that is divided over ranks: each rule reads one part, says which pieces of the
stored tensors that is, and joins all parts.

Joining the parts of what was read gives the stored tensors again, byte for byte. Of the stored tensors a rule reads
only what its part holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from nemorl_tensors.engines.pieces import Piece
from torch import Tensor

from nemorl_megatron.bridge.tables import RuleName, Weight

Index = tuple[slice, ...]
Read = Callable[[str, Index], Tensor]
"""A slice of the stored tensor of this name."""


@dataclass(frozen=True)
class Part:
    """Which of ``ways`` equal parts."""

    number: int
    ways: int

    def of(self, size: int) -> slice:
        """Of a dimension that divides evenly."""
        share = size // self.ways
        return slice(self.number * share, (self.number + 1) * share)


class Rule(Protocol):
    """One way for stored tensors to lie in a parameter."""

    divided: bool
    """Whether ranks hold different parts, or each the same."""

    def shape(self, weight: Weight, ways: int) -> tuple[int, ...]:
        """Of one part."""
        ...

    def read(self, weight: Weight, part: Part, read: Read) -> Tensor:
        """One part."""
        ...

    def pieces(self, weight: Weight, part: Part, values: Tensor) -> Iterator[Piece]:
        """One part as pieces of the stored tensors, sharing its memory."""
        ...

    def join(self, weight: Weight, parts: Sequence[Tensor]) -> list[Tensor]:
        """The stored tensors from all parts."""
        ...


class Whole:
    """The same on every rank."""

    divided = False

    def shape(self, weight: Weight, ways: int) -> tuple[int, ...]:
        return weight.shapes[0]

    def read(self, weight: Weight, part: Part, read: Read) -> Tensor:
        return read(weight.stored[0], ())

    def pieces(self, weight: Weight, part: Part, values: Tensor) -> Iterator[Piece]:
        yield _piece(weight, 0, 0, values)

    def join(self, weight: Weight, parts: Sequence[Tensor]) -> list[Tensor]:
        return [parts[0]]


class Row:
    """One matrix, its columns (inputs) divided."""

    divided = True

    def shape(self, weight: Weight, ways: int) -> tuple[int, ...]:
        rows, columns = weight.shapes[0]
        return (rows, columns // ways)

    def read(self, weight: Weight, part: Part, read: Read) -> Tensor:
        return read(weight.stored[0], (slice(None), part.of(weight.shapes[0][1])))

    def pieces(self, weight: Weight, part: Part, values: Tensor) -> Iterator[Piece]:
        yield Piece(weight.stored[0], weight.shapes[0], (0, part.of(weight.shapes[0][1]).start), values)

    def join(self, weight: Weight, parts: Sequence[Tensor]) -> list[Tensor]:
        return [torch.cat([*parts], 1)]


class Vocabulary:
    """One matrix, a row per entry, with rows of zeros added until it divides."""

    divided = True

    def shape(self, weight: Weight, ways: int) -> tuple[int, ...]:
        entries, hidden = weight.shapes[0]
        return (-(-entries // ways), hidden)

    def read(self, weight: Weight, part: Part, read: Read) -> Tensor:
        entries, hidden = weight.shapes[0]
        rows, _ = self.shape(weight, part.ways)
        first = min(part.number * rows, entries)
        found = read(weight.stored[0], (slice(first, min(first + rows, entries)),))
        return torch.cat([found, found.new_zeros(rows - len(found), hidden)])

    def pieces(self, weight: Weight, part: Part, values: Tensor) -> Iterator[Piece]:
        entries = weight.shapes[0][0]
        first = min(part.number * len(values), entries)
        yield _piece(weight, 0, first, values[: entries - first])

    def join(self, weight: Weight, parts: Sequence[Tensor]) -> list[Tensor]:
        return [torch.cat([*parts])[: weight.shapes[0][0]]]


class GateUp:
    """Two matrices, rows divided; each part is rows of the first, then the same rows of the second."""

    divided = True

    def shape(self, weight: Weight, ways: int) -> tuple[int, ...]:
        rows, columns = weight.shapes[0]
        return (2 * rows // ways, columns)

    def read(self, weight: Weight, part: Part, read: Read) -> Tensor:
        rows = part.of(weight.shapes[0][0])
        return torch.cat([read(name, (rows,)) for name in weight.stored])

    def pieces(self, weight: Weight, part: Part, values: Tensor) -> Iterator[Piece]:
        first = part.of(weight.shapes[0][0]).start
        for index, half in enumerate(values.chunk(2)):
            yield _piece(weight, index, first, half)

    def join(self, weight: Weight, parts: Sequence[Tensor]) -> list[Tensor]:
        halves = zip(*(part.chunk(2) for part in parts), strict=True)
        return [torch.cat(half) for half in halves]


@dataclass(frozen=True)
class QKV:
    """Queries, keys and values by key-value head, ``q0 q1 k0 v0  q2 q3 k1 v1``, then rows divided.

    With fewer key-value heads than parts a part holds some rows of one head's block; megatron-core puts the block
    together as it computes.
    """

    head: int
    """Rows of one head."""
    divided = True

    def shape(self, weight: Weight, ways: int) -> tuple[int, ...]:
        return (sum(shape[0] for shape in weight.shapes) // ways, *weight.shapes[0][1:])

    def read(self, weight: Weight, part: Part, read: Read) -> Tensor:
        groups = weight.shapes[1][0] // self.head
        shared = max(1, part.ways // groups)  # parts that one block is spread over
        blocks = Part(part.number // shared, part.ways // shared).of(groups)
        found = []
        for name, (rows, *_) in zip(weight.stored, weight.shapes, strict=True):
            per_group = rows // groups
            tensor = read(name, (slice(blocks.start * per_group, blocks.stop * per_group),))
            found.append(tensor.reshape(-1, per_group, *tensor.shape[1:]))
        whole = torch.cat(found, 1).flatten(0, 1)
        return whole[Part(part.number % shared, shared).of(len(whole))]

    def pieces(self, weight: Weight, part: Part, values: Tensor) -> Iterator[Piece]:
        groups = weight.shapes[1][0] // self.head
        shared = max(1, part.ways // groups)
        blocks = Part(part.number // shared, part.ways // shared).of(groups)
        sizes = [rows // groups for rows, *_ in weight.shapes]
        held = Part(part.number % shared, shared).of(sum(sizes))  # rows of each block
        for place, block in enumerate(range(blocks.start, blocks.stop)):
            rows = values[place * (held.stop - held.start) :]
            begin = 0
            for index, size in enumerate(sizes):
                first, last = max(begin, held.start), min(begin + size, held.stop)
                if first < last:
                    found = rows[first - held.start : last - held.start]
                    yield _piece(weight, index, block * size + first - begin, found)
                begin += size

    def join(self, weight: Weight, parts: Sequence[Tensor]) -> list[Tensor]:
        groups = weight.shapes[1][0] // self.head
        whole = torch.cat([*parts])
        blocks = whole.reshape(groups, -1, *whole.shape[1:])
        tensors = torch.split(blocks, [shape[0] // groups for shape in weight.shapes], 1)
        return [tensor.flatten(0, 1) for tensor in tensors]


def _piece(weight: Weight, index: int, first: int, rows: Tensor) -> Piece:
    """Rows of a stored tensor, from ``first`` on."""
    return Piece(weight.stored[index], weight.shapes[index], (first,) + (0,) * (rows.ndim - 1), rows)


def rules(head: int) -> Mapping[RuleName, Rule]:
    """Every rule by name, for a model whose attention heads have ``head`` rows."""
    return {
        "whole": Whole(),
        "float32": Whole(),
        "row": Row(),
        "vocabulary": Vocabulary(),
        "gate_up": GateUp(),
        "qkv": QKV(head),
    }
