"""Questions to the index: the steps of a run, and the responses that are wanted, in the order wanted."""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nemorl.base.text.suggest import did_you_mean
from nemorl.errors import UsageError

from nemorl_cli.report.viewing.index import NUMBERS, RecordIndex

ONLY: Mapping[str, str] = {
    "all_wrong": "group_right = 0",
    "all_right": "group_right = group_size",
    "mixed": "group_right > 0 and group_right < group_size",
    "wrong": 'not "right"',
    "truncated": "truncated",
    "filtered": "filtered",
}
"""Filters, and what each asks of a record."""
MOST = 5000
"""Responses in one answer."""
PART = "part:"
"""In front of the name of a reward's component, or of ``metrics/NAME``, where records are sorted by it."""


@dataclass(frozen=True)
class Wanted:
    """Which responses, and in which order."""

    split: str | None = None
    step: int | None = None
    only: Sequence[str] = ()
    """Names of ``ONLY``; all must hold."""
    search: str = ""
    """Words that all must occur; the last may be the beginning of one, and "several words" stand together."""
    sort: str = ""
    """One of ``NUMBERS``, or ``part:NAME``. Empty: as they were recorded."""
    descending: bool = True
    limit: int = MOST
    offset: int = 0


def steps(index: RecordIndex) -> list[dict[str, Any]]:
    """Every step that has records, with its summary, in order."""
    with index.reading() as connection:
        rows = connection.execute(
            "select split, step, part, summary, damage from files order by step, split, part"
        ).fetchall()
    return [
        {"split": split, "step": step, "part": part, "damage": damage, **json.loads(summary)}
        for split, step, part, summary, damage in rows
    ]


def responses(index: RecordIndex, wanted: Wanted) -> dict[str, Any]:
    """Those wanted: ``{"total": how many there are, "rows": facts of at most ``limit``}``.

    Raises:
        UsageError: There is no such filter or order.
    """
    where, values = _conditions(wanted)
    order, order_values = _order(wanted)
    with index.reading() as connection:
        try:
            found = connection.execute(f"select id from records {where} {order}", (*values, *order_values)).fetchall()
        except sqlite3.OperationalError as error:
            raise UsageError(f"the search {wanted.search!r} failed: {error}", fix="search for words") from error
        first = max(0, wanted.offset)
        ids = [number for (number,) in found[first : first + max(0, min(wanted.limit, MOST))]]
        rows = dict(
            connection.execute(f"select id, fact from facts where id in ({', '.join('?' * len(ids))})", ids).fetchall()
        )
    return {"total": len(found), "rows": [json.loads(rows[number]) for number in ids if number in rows]}


def parts(index: RecordIndex) -> list[str]:
    """Names by which a reward's parts and the environment's metrics are sorted."""
    with index.reading() as connection:
        rows = connection.execute(
            "select distinct numbers from (select numbers from records order by id desc limit 256)"
        ).fetchall()
    return sorted({name for (numbers,) in rows for name in json.loads(numbers)})


def match_words(search: str) -> str:
    """A search as FTS5 wants it. Nothing in it is an operator, whatever somebody types.

    Example:
        >>> match_words('the "left hand" ca')
        '"the" "left hand" "ca"*'
    """
    found = re.findall(r'"([^"]*)"?|([^\s"]+)', search)
    terms = [(phrase or word, bool(phrase)) for phrase, word in found]
    terms = [(term, is_phrase) for term, is_phrase in terms if re.search(r"\w", term)]
    if not terms:
        return ""
    quoted = [f'"{term}"' for term, _ in terms]
    return " ".join(quoted) + ("" if terms[-1][1] else "*")


def _conditions(wanted: Wanted) -> tuple[str, list[Any]]:
    conditions: list[str] = []
    values: list[Any] = []
    if wanted.split is not None:
        conditions.append("split = ?")
        values.append(wanted.split)
    if wanted.step is not None:
        conditions.append("step = ?")
        values.append(wanted.step)
    for name in wanted.only:
        if name not in ONLY:
            raise UsageError(f"no filter {name!r}", fix=did_you_mean(name, ONLY) or f"one of {', '.join(ONLY)}")
        conditions.append(f"({ONLY[name]})")
    if wanted.search.strip():
        words = match_words(wanted.search)
        conditions.append("id in (select rowid from texts where texts match ?)" if words else "0")
        values += [words] if words else []
    return f"where {' and '.join(conditions)}" if conditions else "", values


def _order(wanted: Wanted) -> tuple[str, list[Any]]:
    direction = "desc" if wanted.descending else "asc"
    if not wanted.sort:
        return "order by step desc, split, file, row", []
    if wanted.sort.startswith(PART):
        by, values = "json_extract(numbers, ?)", [f"$.{json.dumps(wanted.sort.removeprefix(PART))}"]
    elif wanted.sort in NUMBERS:
        by, values = wanted.sort, []
    else:
        known = ", ".join(NUMBERS)
        raise UsageError(
            f"no order by {wanted.sort!r}", fix=did_you_mean(wanted.sort, NUMBERS) or f"one of {known}, or {PART}NAME"
        )
    return f"order by {by} {direction} nulls last, id", values
