"""From a conversation as the chat template writes it to token ids, items in the place of their placeholders."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from nemorl.errors import DataError

from nemorl_media.family import Encode, Family, Item

Decode = Callable[[int], str]
"""A special token's id to its text."""


def expanded_prompt(text: str, items: Sequence[Item], family: Family, encode: Encode, decode: Decode) -> list[int]:
    """Token ids of a text with items.

    The text is tokenized whole, with what the family writes around items in it: tokens that reach over the edge of an
    item's text are those of the model's own processor.

    Args:
        text: With the placeholder of each item.
        items: In the order of their placeholders.
        family: Of the model.
        encode: Its tokenizer.
        decode: The same.

    Raises:
        DataError: The text has other placeholders than those of the items.
    """
    kinds = {decode(token): kind for kind, token in family.placeholders.items()}
    stand_ins = {kind: decode(token) for kind, token in family.stand_ins.items()}
    # 1. Each run of an item's tokens as one token that the tokenizer knows.
    *parts, last = re.split("|".join(f"({re.escape(name)})" for name in kinds), text)
    found = [part for part in parts if part in kinds]
    wanted = [item.media.kind for item in items]
    if [kinds[name] for name in found] != wanted:
        raise _unequal([kinds[name] for name in found], wanted)
    written, runs, rest = [], [], iter(items)
    for part in parts:
        if part in kinds:
            item = next(rest)
            for piece in family.pieces(item):
                runs += [] if isinstance(piece, str) else [piece]
                written.append(piece if isinstance(piece, str) else stand_ins[item.media.kind])
        elif part is not None:
            written.append(part)
    ids = encode("".join([*written, last]))
    # 2. These tokens as the runs.
    places = set(family.stand_ins.values())
    if sum(token in places for token in ids) != len(runs):
        raise DataError(
            f"the text has a token that stands for an item ({', '.join(stand_ins.values())}) and no item for it",
            fix="remove it from the text",
        )
    following = iter(runs)
    return [part for token in ids for part in (next(following) if token in places else (token,))]


def _unequal(found: Sequence[str], wanted: Sequence[str]) -> DataError:
    return DataError(
        f"the chat template wrote placeholders of [{', '.join(found)}] for items of [{', '.join(wanted)}]",
        fix="use the model's own chat template, and texts without its placeholders",
    )
