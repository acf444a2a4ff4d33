"""Tables whose rows are not nemorl's one for one: trees of replies, ranked responses, texts to be joined; and which
rows of a table a preset keeps.
"""

from __future__ import annotations

import math
import sys
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations, pairwise
from typing import TYPE_CHECKING, Any

from nemorl.errors import DataError

from nemorl_tasks.datasets.mapping import look_up, response_of
from nemorl_tasks.datasets.preset_file import Preset, Ranked, Threads

if TYPE_CHECKING:
    from nemorl_tasks.datasets.preset import PresetConfig

Table = Sequence[Mapping[str, Any]]


def expand(table: Table, preset: Preset, config: PresetConfig, source: str) -> Table:
    """The table itself, or the rows that its rows make.

    Raises:
        DataError: a row does not hold what the preset says.
    """
    if preset.threads is not None:
        return [found for number, row in enumerate(table) for found in _threads(row, preset.threads, source, number)]
    if preset.ranked is not None:
        ranked = preset.ranked
        return [
            pair
            for number, row in enumerate(table)
            for pair in _pairs(row, ranked, config.pairs, f"{source}, row {number}")
        ]
    if config.characters_per_row is not None:
        return list(_packed(table, preset.columns["response"], config.characters_per_row, source))
    return table


def selected(table: Table, preset: Preset, source: str) -> Sequence[int]:
    """Numbers of the rows that the preset keeps."""
    if not (preset.keep or preset.drop):
        return range(len(table))
    kept = {column: {value.casefold() for value in values} for column, values in preset.keep.items()}
    dropped = {column: {value.casefold() for value in values} for column, values in preset.drop.items()}
    numbers = array("q")
    for number, row in enumerate(_narrowed(table, [*kept, *dropped])):
        place = f"{source}, row {number}"
        is_kept = all(_plain(look_up(row, column, place)) in values for column, values in kept.items())
        if is_kept and all(_plain(look_up(row, column, place)) not in values for column, values in dropped.items()):
            numbers.append(number)
    return numbers


def _narrowed(table: Table, columns: Sequence[str]) -> Iterable[Mapping[str, Any]]:
    """The rows with these columns alone where leaving out the others saves reading them: of a ``datasets.Dataset``."""
    datasets = sys.modules.get("datasets")
    if datasets is None or not isinstance(table, datasets.Dataset):
        return table
    names = {column if column in table.column_names else column.partition(".")[0] for column in columns}
    return table.select_columns([name for name in table.column_names if name in names])  # type: ignore[no-any-return]


def _plain(value: Any) -> str:
    return "" if value is None else str(value).strip().casefold()


def _pairs(row: Mapping[str, Any], ranked: Ranked, which: str, place: str) -> Iterator[dict[str, Any]]:
    """The row once per pair of responses, with ``chosen`` and ``rejected``."""
    given = look_up(row, ranked.completions, place)
    if not isinstance(given, list) or len(given) < 2 or not all(isinstance(item, Mapping) for item in given):
        raise DataError(f"{place}: column {ranked.completions!r} holds no two responses", fix="leave such rows out")
    scored = []
    for item in given:
        rank = look_up(item, ranked.rank, place)
        if isinstance(rank, bool) or not isinstance(rank, int | float) or math.isnan(rank):
            raise DataError(f"{place}: {ranked.rank} = {rank!r} is no number", fix="correct the row")
        scored.append(
            (rank if ranked.lower_is_better else -rank, _response(look_up(item, ranked.response, place), place))
        )
    scored.sort(key=lambda pair: pair[0])  # stable: equal ranks stay in their order
    if which == "best_worst":
        couples = [(scored[0], scored[-1])]
    elif which == "neighbours":
        couples = list(pairwise(scored))
    else:
        couples = list(combinations(scored, 2))
    rest = {key: value for key, value in row.items() if key != ranked.completions}
    for (better, chosen), (worse, rejected) in couples:
        if better < worse:
            answer = chosen if isinstance(chosen, str) else chosen[0]["content"]
            yield {**rest, "chosen": chosen, "rejected": rejected, "response": chosen, "answer": answer}


def _response(value: Any, place: str) -> Any:
    """Text, or what the message says that a list of one holds."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], Mapping) and "content" in value[0]:
        return response_of(value[0])
    if not isinstance(value, str):
        raise DataError(f"{place}: a response is {value!r:.60}, neither text nor one message", fix="correct the row")
    return value


def _threads(row: Mapping[str, Any], threads: Threads, source: str, number: int) -> Iterator[dict[str, Any]]:
    """A row of ``messages`` per way from the first message to a last reply, where there is a reply at all."""
    place = f"{source}, row {number}"
    rest = {key: value for key, value in row.items() if key != threads.root}

    def walk(message: Mapping[str, Any], before: list[dict[str, str]]) -> Iterator[list[dict[str, str]]]:
        role, text = (str(look_up(message, field, place)) for field in (threads.role, threads.text))
        said = [*before, {"role": threads.roles.get(role, role), "content": text}]
        replies = message.get(threads.replies) or []
        if not replies:
            yield said
        for reply in replies:
            yield from walk(reply, said)

    for messages in walk(look_up(row, threads.root, place), []):
        if len(messages) > 1:
            yield {**rest, "messages": messages}


def _packed(table: Table, column: str, characters: int, source: str) -> Iterator[dict[str, Any]]:
    """Rows of ``text``, joined by line breaks until one has enough characters. Empty ones are left out."""
    texts: list[str] = []
    held = 0
    for number in range(len(table)):
        text = look_up(table[number], column, f"{source}, row {number}")
        if not isinstance(text, str) or not text:
            continue
        texts.append(text)
        held += len(text)
        if held >= characters:
            yield {column: "\n".join(texts)}
            texts, held = [], 0
    if texts:
        yield {column: "\n".join(texts)}
