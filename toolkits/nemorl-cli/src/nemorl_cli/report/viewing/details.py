"""One record whole: its turns, and the numbers of each of its tokens, as plain data."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemorl_cli.report.records.media_labels import file_size
from nemorl_cli.report.records.reading import RecordFile, read_table
from nemorl_cli.report.viewing.facts import facts_of
from nemorl_cli.report.viewing.index import Place

if TYPE_CHECKING:
    import pyarrow as pa

LOGPROBS = ("generation_logprobs", "old_logprobs", "policy_logprobs", "reference_logprobs")
PER_TOKEN = (*LOGPROBS, "advantages", "loss_weights")
OF_GROUP = ("group_right", "group_size")
"""Facts that one record of a group cannot tell."""
DIGITS = 5
"""Of numbers per token."""
Detail = dict[str, Any]


def detail_at(place: Place, texts: Mapping[int, str]) -> Detail | None:
    """A record by its place; ``None`` where the file has fewer by now.

    Raises:
        ValueError, OSError: The file is damaged or gone.
    """
    file = RecordFile.of(place.path)
    assert file is not None, "only files of records are indexed"
    table = read_table(file)
    if place.row >= len(table):
        return None
    (found,) = details_of(table.slice(place.row, 1), texts, place.path.parents[1])
    return {name: value for name, value in found.items() if name not in OF_GROUP}


def details_of(table: pa.Table, texts: Mapping[int, str], folder: Path) -> list[Detail]:
    """Records whole: their facts with full texts, ``turns`` as recorded, and ``sequences``, in which ``texts`` stands
    beside ``token_ids`` where the texts of tokens are known. Items of ``media`` have a ``size`` for people, and turns
    that show some have ``pieces``: their text, and between its parts the items' places in ``media``.

    Args:
        table: All columns of records.
        texts: Token id -> text.
        folder: Of the records.
    """
    table = whole_columns(table)
    return with_sequences(light_details(table, folder), table, range(len(table)), texts)


def whole_columns(table: pa.Table) -> pa.Table:
    """The columns of records, each in one piece."""
    import pyarrow as pa

    from nemorl_cli.report.records.schema import SCHEMA

    return pa.Table.from_arrays([table[name].combine_chunks() for name in SCHEMA.names], SCHEMA.names)


def light_details(table: pa.Table, folder: Path) -> list[Detail]:
    """:func:`details_of` without ``sequences``, which are nearly all of the work.

    Args:
        table: As :func:`whole_columns` makes it.
        folder: Of the records.
    """
    return [
        {
            **fact,
            "time": row["time"],
            "media": [{**item, "size": file_size(folder, item["digest"])} for item in fact["media"] or ()],
            "turns": [_turn(turn) for turn in row["turns"] or ()],
        }
        for fact, row in zip(facts_of(table), table.select(["turns", "time"]).to_pylist(), strict=True)
    ]


def with_sequences(
    details: Sequence[Detail], table: pa.Table, rows: Sequence[int], texts: Mapping[int, str]
) -> list[Detail]:
    """Light details, each of a row of ``table``, made whole."""
    parts = table["sequences"].take(list(rows)).to_pylist()
    return [
        {**detail, "sequences": [_sequence(part, texts) for part in of_row or ()]}
        for detail, of_row in zip(details, parts, strict=True)
    ]


def _turn(turn: Mapping[str, Any]) -> dict[str, Any]:
    shown, text = turn.get("shown") or (), turn["text"] or ""
    if not shown:
        return {name: value for name, value in turn.items() if name != "shown"}
    pieces: list[str | int] = []
    end = 0
    for one in shown:
        pieces += [text[end : one["at"]], one["item"]]
        end = one["at"]
    return {**turn, "pieces": [*pieces, text[end:]]}


def _sequence(part: Mapping[str, Any], texts: Mapping[int, str]) -> dict[str, Any]:
    ids = part["token_ids"] or []
    return {
        "token_ids": ids,
        "texts": [texts.get(token) for token in ids] if texts else None,
        "mask": [int(bool(chosen)) for chosen in part["mask"] or ()],
        **{name: _short(part[name]) for name in PER_TOKEN},
        "version_runs": [[run["start"], run["version"]] for run in part.get("version_runs") or ()],
    }


def _short(values: Iterable[float | None] | None) -> list[float | None] | None:
    if values is None:
        return None
    return [float(f"{v:.{DIGITS}g}") if v is not None and math.isfinite(v) else None for v in values]
