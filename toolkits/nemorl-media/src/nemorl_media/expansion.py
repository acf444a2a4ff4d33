"""From a conversation as the chat template writes it to token ids, items in the place of their placeholders.

A text is tokenized whole, with what the family writes around items in it: tokens that reach over the edge of an item's
text are those of the model's own processor. Each run of an item's tokens stands in it as one token that the tokenizer
knows, and is put in its place afterwards.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from nemorl.errors import DataError
from nemorl.media import Media

from nemorl_media.family import Encode, Family

Decode = Callable[[int], str]
"""A special token's id to its text."""


@dataclass(frozen=True)
class Written:
    """A text with all that stands around its items, one token for each run of theirs."""

    text: str
    places: tuple[tuple[int, int], ...]
    """Where in the given text a placeholder ended, and by how much all after it has moved"""
    runs: tuple[range, ...]
    """Ids of the items, run by run"""
    tokens: frozenset[int]
    """Those that stand for a run"""

    def moved(self, place: int) -> int:
        """Where a place of the given text is, one that is not within a placeholder."""
        return place + next((by for end, by in reversed(self.places) if end <= place), 0)

    def filled(self, ids: Sequence[int]) -> list[Sequence[int]]:
        """Of each token of the text those that stand for it: of a run the item's own.

        Raises:
            DataError: The text has a token of a run that is none.
        """
        if sum(token in self.tokens for token in ids) != len(self.runs):
            raise DataError(
                "a text has a token that stands for an image or a sound, and there is none for it",
                fix="remove the model's own placeholder tokens from the text",
            )
        runs = iter(self.runs)
        return [next(runs) if token in self.tokens else (token,) for token in ids]

    def ids(self, encode: Encode) -> list[int]:
        """The text tokenized, with its items."""
        return [token for part in self.filled(encode(self.text)) for token in part]


def written(text: str, media: Sequence[Media], family: Family, decode: Decode) -> Written:
    """A text with its items. They are processed one after the other: no two of them are held for it.

    Args:
        text: With the placeholder of each item.
        media: Items in the order of their placeholders.
        family: Of the model.
        decode: Its tokenizer.

    Raises:
        DataError: The text has other placeholders than those of the items, or one of these cannot be read.
    """
    kinds = {decode(token): kind for kind, token in family.placeholders.items()}
    stand_ins = {kind: decode(token) for kind, token in family.stand_ins.items()}
    found = [*re.finditer("|".join(map(re.escape, kinds)), text)]
    wanted = [item.kind for item in media]
    if [kinds[one[0]] for one in found] != wanted:
        raise _unequal([kinds[one[0]] for one in found], wanted)
    parts: list[str] = []
    runs: list[range] = []
    places: list[tuple[int, int]] = []
    end = moved = 0
    for one, item in zip(found, media, strict=True):
        pieces = family.pieces(family.outline(item))
        shown = "".join(piece if isinstance(piece, str) else stand_ins[item.kind] for piece in pieces)
        runs += [piece for piece in pieces if not isinstance(piece, str)]
        parts += [text[end : one.start()], shown]
        end, moved = one.end(), moved + len(shown) - len(one[0])
        places.append((end, moved))
    return Written("".join([*parts, text[end:]]), tuple(places), tuple(runs), frozenset(family.stand_ins.values()))


def expanded_prompt(text: str, media: Sequence[Media], family: Family, encode: Encode, decode: Decode) -> list[int]:
    """Token ids of a text with items; arguments and errors are those of ``written``."""
    return written(text, media, family, decode).ids(encode)


def _unequal(found: Sequence[str], wanted: Sequence[str]) -> DataError:
    return DataError(
        f"the chat template wrote placeholders of [{', '.join(found)}] for items of [{', '.join(wanted)}]",
        fix="use the model's own chat template, and texts without its placeholders",
    )
