"""Media: images and sounds of a conversation, and how they stand among token ids.

An item stands where the model's processor would write placeholders, one id per token that the model makes of it. These
ids are no tokens of the vocabulary: they name the item by its content, and the place in it. So ids alone say what a
model is shown: sequences are equal, or begin alike, exactly where their ids do, whoever compares them, and a model that
knows no media cannot take them for words. Whoever runs a model puts its placeholder in their place
(``nemorl_media``).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

MediaKind = Literal["image", "audio"]
"""A film is a sequence of images.

>>> kind: MediaKind = "image"
"""

FIRST_ID = 1 << 62
"""The least id that is no token of any vocabulary; the greatest is below 2^63."""
PLACE_BITS = 14
MAX_TOKENS = 1 << PLACE_BITS
"""Most tokens of one item."""
NAME_DIGITS = 12
"""Hexadecimal digits of a digest in an id: 48 bits."""


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Media:
    """An image or a sound, as the bytes of a file.

    >>> Media("image", b"...").digest == Media("image", b"...").digest
    True
    """

    kind: MediaKind
    data: bytes
    """Encoded: PNG, JPEG, WAV, …"""
    digest: str = ""
    """Hexadecimal, of what the model is shown: the data, and the settings by which it is processed."""

    def __post_init__(self) -> None:
        if not self.digest:
            object.__setattr__(self, "digest", hashlib.sha256(self.kind.encode() + b"\0" + self.data).hexdigest())

    @property
    def name(self) -> int:
        """The item in its token ids, without the place."""
        return (FIRST_ID >> PLACE_BITS) | int(self.digest[:NAME_DIGITS], 16)

    def token_ids(self, count: int) -> range:
        """The ids of its first ``count`` tokens."""
        first = self.name << PLACE_BITS
        return range(first, first + count)

    def __repr__(self) -> str:
        return f"Media({self.kind}, {len(self.data)} bytes, {self.digest[:NAME_DIGITS]})"


def is_media(token_id: int) -> bool:
    """The id stands for a part of an image or a sound.

    >>> is_media(5), is_media(Media("image", b"...").token_ids(1)[0])
    (False, True)
    """
    return token_id >= FIRST_ID


def media_runs(token_ids: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Where items stand: the place of the first token and the one past the last, in order.

    >>> picture = Media("image", b"...")
    >>> [*media_runs([5, *picture.token_ids(3), *picture.token_ids(2), 6])]
    [(1, 4), (4, 6)]
    """
    start = 0
    while start < len(token_ids):
        end = start + 1
        if is_media(token_ids[start]):
            while end < len(token_ids) and token_ids[end] == token_ids[end - 1] + 1:
                end += 1
            yield start, end
        start = end


def shown_names(token_ids: Iterable[int]) -> set[int]:
    """Names of the items that ids show.

    >>> picture = Media("image", b"...")
    >>> shown_names([5, *picture.token_ids(3)]) == {picture.name}
    True
    """
    return {token >> PLACE_BITS for token in token_ids if is_media(token)}


def media_by_name(items: Iterable[Media]) -> dict[int, Media]:
    """Each of these items once.

    >>> len(media_by_name([Media("image", b"..."), Media("image", b"...")]))
    1
    """
    return {item.name: item for item in items}


def text_ids(token_ids: Iterable[int]) -> list[int]:
    """The ids that are tokens of the vocabulary.

    >>> text_ids([5, *Media("image", b"...").token_ids(2), 6])
    [5, 6]
    """
    ids = list(token_ids)
    return ids if max(ids, default=0) < FIRST_ID else [token for token in ids if token < FIRST_ID]
