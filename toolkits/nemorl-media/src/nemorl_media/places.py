"""Places of items in the token ids of a request, for engines that are told where each one stands."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from nemorl.errors import BackendError
from nemorl.media import FIRST_ID, MAX_TOKENS, PLACE_BITS, Media, MediaKind, is_media, media_by_name, media_runs

from nemorl_media.family import Family, Item

SEND_ALONG = "send the items along with the ids: `media` of the request or prompt"


@dataclass(frozen=True)
class Placed:
    """An item where it stands in a sequence. One that is shown twice has two places."""

    item: Item
    start: int
    """Of its first token"""
    is_item: tuple[bool, ...]
    """Of each token from there to its last one: a part of it, or one of the markers that stand between its parts"""


def named_in(token_ids: Sequence[int], media: Iterable[Media]) -> dict[int, Media]:
    """The items that these ids show, by name.

    Raises:
        BackendError: One of them is not there.
    """
    known = media_by_name(media)
    shown = dict.fromkeys(token >> PLACE_BITS for token in token_ids if token >= FIRST_ID)
    missing = sum(name not in known for name in shown)
    if missing:
        raise BackendError(
            f"token ids show {missing} images or sounds that do not come with them ({len(known)} do)", fix=SEND_ALONG
        )
    return {name: known[name] for name in shown}


def as_words(
    token_ids: Iterable[int], items: Mapping[int, Media], placeholders: Mapping[MediaKind, int]
) -> tuple[int, ...]:
    """The ids as the tokenizer knows them: in place of each token of an item the placeholder of its kind.

    Args:
        token_ids: Of a sequence.
        items: Those in it, by name, of kinds that have a placeholder.
        placeholders: By kind.
    """
    return tuple(placeholders[items[token >> PLACE_BITS].kind] if is_media(token) else token for token in token_ids)


def placed(token_ids: Sequence[int], items: Mapping[int, Media], family: Family) -> list[Placed]:
    """The items of a sequence in the order of their places, processed.

    Args:
        token_ids: Of a sequence.
        items: Those in it, by name.
        family: Of the model.

    Raises:
        BackendError: An item is cut, or has another number of tokens than the model makes of it.
        DataError: One cannot be decoded.
    """
    runs: list[list[tuple[int, int]]] = []
    for start, end in media_runs(token_ids):
        place = token_ids[start] & (MAX_TOKENS - 1)
        goes_on = bool(runs) and place > 0 and token_ids[start] == token_ids[runs[-1][-1][1] - 1] + 1
        runs[-1].append((start, end)) if goes_on else runs.append([(start, end)])
    return [_placed(token_ids, parts, family.item(items[token_ids[parts[0][0]] >> PLACE_BITS])) for parts in runs]


def _placed(token_ids: Sequence[int], parts: Sequence[tuple[int, int]], item: Item) -> Placed:
    first, last = parts[0][0], parts[-1][1]
    is_item = tuple(is_media(token) for token in token_ids[first:last])
    place = token_ids[first] & (MAX_TOKENS - 1)
    if place or sum(is_item) != item.tokens:
        raise BackendError(
            f"token ids show tokens {place} to {place + sum(is_item) - 1} of {item.media}, of which the model makes "
            f"{item.tokens}",
            fix="show items whole, processed by the settings of policy.media.processor",
        )
    return Placed(item, first, is_item)
