"""Images and sounds of recorded episodes among their tokens, which records hold in 32 bits.

A token of the item at place i of an episode's column ``media`` is -(1 + i). Which of the item's tokens it is follows
from those before it: the tokens of an item stand in order, and all of them do.

# R = episodes, S = token sequences of all episodes, T = tokens of all sequences
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from nemorl.media import FIRST_ID, MAX_TOKENS, NAME_DIGITS, PLACE_BITS, Media, media_by_name

from nemorl_cli.report.records.columns import strings
from nemorl_cli.report.records.schema import ITEM, SHOWN
from nemorl_cli.report.records.tokens import Array, Tokens

Item = Mapping[str, Any]
"""Of the column ``media``: ``digest``, ``kind``, ``tokens``."""


class Run(NamedTuple):
    """Tokens of an item that stand one after the other."""

    item: int
    """Its place in the episode's ``media``"""
    first: int
    """Which of the item's tokens is the first"""
    start: int
    """Where that stands in the sequence"""
    stop: int
    """One beyond the last"""


@dataclass(frozen=True)
class Shown:
    """The items of some episodes."""

    token_ids: Array
    """[T] int32, as records have them"""
    media: Sequence[Sequence[tuple[Media, int]]]
    """[R] the items of each episode, and how many tokens each has"""
    runs: Mapping[int, Sequence[Run]]
    """Of each sequence [S] that shows any, in order"""

    @classmethod
    def of(cls, tokens: Tokens, media: Sequence[Sequence[Media]]) -> Shown:
        """
        Args:
            tokens: Of the episodes.
            media: [R] the items in any of each one's sequences, those of the prompt first.

        Raises:
            ValueError: a token is of an item that the episode does not have, or an item is not shown as a whole.
        """
        items = [list(media_by_name(of_episode).values()) for of_episode in media]
        runs = _runs(tokens, [{item.name: place for place, item in enumerate(given)} for given in items])
        episodes = np.searchsorted(tokens.episodes, np.arange(len(tokens.lengths)), side="right") - 1
        counts = [[0] * len(given) for given in items]
        for sequence, found in runs.items():
            of_item = counts[episodes[sequence]]
            for run in found:
                of_item[run.item] = max(of_item[run.item], run.first + run.stop - run.start)
        ids = tokens.token_ids.copy()
        for sequence, found in runs.items():
            _require_whole(found, counts[episodes[sequence]])
            for run in found:
                ids[tokens.starts[sequence] + run.start : tokens.starts[sequence] + run.stop] = -(1 + run.item)
        pairs = [list(zip(given, count, strict=True)) for given, count in zip(items, counts, strict=True)]
        return cls(ids.astype(np.int32), pairs, runs)

    @property
    def column(self) -> pa.Array:
        """The column ``media``."""
        pairs = [pair for of_episode in self.media for pair in of_episode]
        columns = {
            "digest": strings([item.digest for item, _ in pairs]),
            "kind": strings([item.kind for item, _ in pairs]),
            "tokens": pa.array([count for _, count in pairs], pa.int32()),
        }
        structs = pa.StructArray.from_arrays([columns[field.name] for field in ITEM], fields=list(ITEM))
        starts = np.cumsum([0, *map(len, self.media)])
        return pa.ListArray.from_arrays(pa.array(starts, pa.int32()), structs)


def shown_in(runs: Sequence[Run], ids: Sequence[int], start: int, decode: Callable[[Sequence[int]], str]) -> list[Any]:
    """``shown`` of a turn: each item where it is shown, and how many characters of the turn's text stand before it.

    What the model's family writes between the tokens of one item, and the tokenizer shows as nothing, parts none.

    Args:
        runs: Of the turn's sequence.
        ids: Of the turn.
        start: The turn's first token in its sequence.
        decode: Token ids to text.
    """
    found: list[dict[str, int]] = []
    for run in runs:
        if not start <= run.start < start + len(ids):
            continue
        at, count = len(decode(ids[: run.start - start])), run.stop - run.start
        if found and run.first and (found[-1]["item"], found[-1]["at"]) == (run.item, at):
            found[-1]["tokens"] += count
        else:
            found.append({"item": run.item, "at": at, "tokens": count})
    return found


def shown_column(turns: Sequence[Sequence[Mapping[str, int]]]) -> pa.Array:
    """``shown`` of turns."""
    return pa.array([[*turn] for turn in turns], pa.list_(SHOWN))


def true_ids(stored: Sequence[int], media: Sequence[Item] | None) -> tuple[int, ...]:
    """Token ids of a record as they were sampled and observed.

    Args:
        stored: ``token_ids`` of a sequence.
        media: Of its episode.

    Raises:
        ValueError: a token is of an item that the episode does not have.

    Example:
        >>> ids = true_ids([5, -1, -1, 6], [{"digest": "0" * 64, "kind": "image", "tokens": 2}])
        >>> ids == (5, 2**62, 2**62 + 1, 6)
        True
    """
    items = [(Media(item["kind"], b"", item["digest"]), item["tokens"]) for item in media or ()]
    counts = [0] * len(items)
    found = []
    for token in stored:
        if token >= 0:
            found.append(token)
            continue
        place = -1 - token
        if place >= len(items):
            raise ValueError(f"a token is of item {place}, and the episode has {len(items)}")
        item, tokens = items[place]
        found.append(item.token_ids(tokens)[counts[place] % tokens])
        counts[place] += 1
    return tuple(found)


def named_ids(stored: Sequence[int], media: Sequence[Item] | None) -> list[int | str]:
    """Token ids of a record, those of items by the items' names: for comparison, and for people.

    Example:
        >>> named_ids([5, -1, -1], [{"digest": "0123456789abcdef", "kind": "image", "tokens": 2}])
        [5, 'image 0123456789ab:0', 'image 0123456789ab:1']
    """
    if not media:
        return list(stored)
    names = [f"{item['kind']} {item['digest'][:NAME_DIGITS]}" for item in media]
    ids = true_ids(stored, media)
    return [
        token if token >= 0 else f"{names[-1 - token]}:{true % MAX_TOKENS}"
        for token, true in zip(stored, ids, strict=True)
    ]


def _runs(tokens: Tokens, places: Sequence[Mapping[int, int]]) -> dict[int, list[Run]]:
    """Runs of each sequence.

    Args:
        tokens: Of all episodes.
        places: [R] name -> place in ``media``
    """
    ids = tokens.token_ids
    where = np.flatnonzero(ids >= FIRST_ID)
    found: dict[int, list[Run]] = defaultdict(list)
    if not len(where):
        return found
    parts = (np.diff(where) != 1) | (np.diff(ids[where]) != 1) | np.isin(where[1:], tokens.starts)
    begins = np.flatnonzero(np.append(True, parts))
    ends = np.append(begins[1:], len(where)) - 1
    sequences = np.searchsorted(tokens.starts, where[begins], side="right") - 1
    episodes = np.searchsorted(tokens.episodes, sequences, side="right") - 1
    columns = (sequences, episodes, ids[where[begins]], where[begins], where[ends] + 1)
    for sequence, episode, token, start, stop in zip(*(column.tolist() for column in columns), strict=True):
        place = places[episode].get(token >> PLACE_BITS)
        if place is None:
            raise ValueError("a token is of an image or a sound that its episode does not carry")
        offset = int(tokens.starts[sequence])
        found[sequence].append(Run(place, token % MAX_TOKENS, start - offset, stop - offset))
    return found


def _require_whole(runs: Sequence[Run], counts: Sequence[int]) -> None:
    """Each run goes on from the one before it of its item, or begins the item anew where that was its end."""
    reached = [0] * len(counts)
    for run in runs:
        if run.first != reached[run.item]:
            raise ValueError("an image or a sound is shown in part, which records cannot hold")
        reached[run.item] = (run.first + run.stop - run.start) % counts[run.item]
    if any(reached):
        raise ValueError("an image or a sound is shown in part, which records cannot hold")
