"""A batch cut into sequences, into the shards of its ranks, and what ranks say of their tokens put back in order.

# N = tokens of all sequences concatenated, B = sequences

On the host everything is cut with numpy, whose slices cost a tenth of torch's: a driver cuts as many pieces as a step
has sequences, once per call and field.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy
import torch
from torch import Tensor

from nemorl_tensors.travelling import as_integers

if TYPE_CHECKING:
    from nemorl_tensors.batch import TokenBatch

SPAN_TOKENS = 256
"""Mean length from which sequences are copied span by span. Shorter ones are gathered token by token: a span costs as
much as gathering some hundred tokens."""


class Shards(Sequence["TokenBatch"]):
    """The part of each rank, cut out of the batch when asked for: the driver need not hold them all at once.

    Example:
        >>> from nemorl_tensors import TokenBatch
        >>> batch = TokenBatch.from_sequences([[5, 6, 7], [5, 8]], [[False, True, True], [False, True]])
        >>> Shards(batch, [[1], [0]])[0].token_ids.tolist()
        [5, 8]
    """

    def __init__(self, batch: TokenBatch, indices: Sequence[Sequence[int]]) -> None:
        """
        Args:
            batch: Of a step.
            indices: Sequences of each rank.
        """
        self._batch, self._indices = batch, indices
        self._is_host = batch.token_ids.device.type == "cpu"
        self._sizes, self._stops = batch.lengths.tolist(), torch.cumsum(batch.lengths, 0).tolist()
        self._rows: dict[int, numpy.ndarray[Any, Any]] = {}
        """The batch's tensors as arrays, by their identity"""

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, rank: Any) -> Any:
        sequences, sizes, stops = self._indices[rank], self._sizes, self._stops
        if not self._is_host or sum(sizes[one] for one in sequences) < SPAN_TOKENS * max(1, len(sequences)):
            return self._batch.select(sequences)
        spans = [slice(stops[one] - sizes[one], stops[one]) for one in sequences]

        def cut(values: Tensor) -> Tensor:
            rows = self._rows.get(id(values))
            if rows is None:
                rows = self._rows[id(values)] = as_integers(values)
            return torch.from_numpy(numpy.concatenate([rows[span] for span in spans])).view(values.dtype)

        return self._batch.cut_by(torch.tensor(sequences, dtype=torch.int64), cut)


def in_order(lengths: Tensor, shards: Sequence[Sequence[int]], columns: Sequence[Tensor]) -> Tensor:
    """What each shard says of its tokens, in the order of the batch.

    Args:
        lengths: [B] int64 tokens of each sequence.
        shards: Sequences of each rank; together each of B once.
        columns: What each rank says of its tokens, [its N, …].

    Example:
        >>> in_order(torch.tensor([1, 2]), [[1], [0]], [torch.tensor([7, 8]), torch.tensor([9])]).tolist()
        [9, 7, 8]
    """
    if len(shards) == 1:
        return columns[0]
    stops, sizes = torch.cumsum(lengths, 0).tolist(), lengths.tolist()
    known = columns[0]
    found = torch.empty((stops[-1] if stops else 0, *known.shape[1:]), dtype=known.dtype)
    rows = as_integers(found)
    for shard, column in zip(shards, columns, strict=True):
        said, start = as_integers(column.cpu()), 0
        assert len(said) == sum(sizes[index] for index in shard), f"{len(said)} values of a shard, one for each token?"
        for index in shard:
            size = sizes[index]
            rows[stops[index] - size : stops[index]] = said[start : start + size]
            start += size
    return found


def cutter(starts: Tensor, lengths: Tensor) -> Callable[[Tensor], Tensor]:
    """A function from [N, …] values to those of the sequences at ``starts``, one after the other.

    Args:
        starts: First token of each.
        lengths: Tokens of each.
    """
    spans = _spans(starts, lengths)
    count = int(lengths.sum())
    if count >= SPAN_TOKENS * len(spans):
        return lambda values: torch.cat([values[start:stop] for start, stop in spans])
    shifts = starts - (torch.cumsum(lengths, 0) - lengths)
    tokens = torch.arange(count, device=lengths.device) + torch.repeat_interleave(shifts, lengths)
    return lambda values: values[tokens]


def _spans(starts: Tensor, lengths: Tensor) -> list[tuple[int, int]]:
    """Tokens [start, stop) of each sequence; neighbours that follow one another are one span."""
    spans: list[tuple[int, int]] = []
    for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
        if spans and start == spans[-1][1]:
            spans[-1] = (spans[-1][0], start + length)
        else:
            spans.append((start, start + length))
    return spans or [(0, 0)]
