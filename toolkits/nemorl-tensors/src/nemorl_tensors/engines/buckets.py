"""Weights on their way out, in buckets: as many tensors at a time as are worth a message, and no more in memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor

BUCKET_BYTES = 256 * 2**20
"""Size of one bucket of exported weights."""


def in_buckets(
    parts: Iterable[tuple[Mapping[str, Tensor], int]], bucket_bytes: int = BUCKET_BYTES
) -> Iterator[dict[str, Tensor]]:
    """Tensors as ``export_weights`` yields them. All ranks get as many buckets, whatever each puts into them.

    Args:
        parts: What this rank contributes, by Hugging Face name, and how many bytes that is on the rank that has it.
        bucket_bytes: A bucket ends with the part that makes it this large.
    """
    bucket: dict[str, Tensor] = {}
    size = 0
    for tensors, nbytes in parts:
        bucket |= tensors
        size += nbytes
        if size >= bucket_bytes:
            yield bucket
            bucket, size = {}, 0
    if size:
        yield bucket


class KeptBucket(dict[str, Tensor]):
    """A bucket that a transport hands out again for each version whose tensors lie in the same places.

    What a reader made of its tensors can stay with it, and goes when the transport drops the bucket.
    """

    made: Any = None


class BroughtBucket(dict[str, Tensor]):
    """A bucket of a transport that brings less, or more, than the bytes of its tensors."""

    brought_bytes: int = 0
    """Of this bucket, or in the first one of all"""


class CountedBuckets:
    """Weights on their way in, and the bytes of those that have come."""

    def __init__(self, buckets: Iterable[Mapping[str, Tensor]]) -> None:
        self._buckets = buckets
        self.nbytes = 0

    def __iter__(self) -> Iterator[Mapping[str, Tensor]]:
        for bucket in self._buckets:
            if isinstance(bucket, BroughtBucket):
                self.nbytes += bucket.brought_bytes
            else:
                self.nbytes += sum(tensor.nbytes for tensor in bucket.values())
            yield bucket
