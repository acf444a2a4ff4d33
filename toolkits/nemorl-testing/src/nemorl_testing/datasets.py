"""Checks of datasets: rows of a usable shape, the same every time, and held-out ones that are held out."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from nemorl.errors import NemorlError

from nemorl_testing.kit import NotApplicable, Subject, expect

LOOKED_AT = 200
"""Rows that are read one by one; comparisons of splits take all."""
CONTENT = ("prompt", "messages", "answer", "response", "chosen", "rejected")
"""Columns that make a row what it is. Rows may share a prompt: with another answer they are other rows."""


def check_rows_are_an_indexable_sequence(subject: Subject) -> None:
    """``build("train")`` has a length and rows at 0 … length - 1, as often as they are asked for. (DESIGN 5)"""
    rows = _rows(subject)
    expect(len(rows) > 0, "there are no rows")
    for index in (0, len(rows) // 2, len(rows) - 1):
        expect(isinstance(rows[index], Mapping), f"row {index} is {rows[index]!r}, not a mapping")
        expect(rows[index] == rows[index], f"row {index} is another one each time")
    try:
        beyond = rows[len(rows)]
    except IndexError:
        return
    expect(False, f"row {len(rows)} of {len(rows)} is {beyond!r}, not an IndexError")


def check_rows_have_a_usable_shape(subject: Subject) -> None:
    """Rows carry ``prompt`` or ``messages``, or a prompt with ``chosen`` and ``rejected``. (DESIGN 5)

    ``prompt: []`` is a task whose environment speaks first.
    """
    rows = _rows(subject)
    for index in range(min(len(rows), LOOKED_AT)):
        problem = _shape_problem(rows[index])
        expect(problem is None, f"row {index} {problem}: {rows[index]!r}"[:500])


def check_rows_are_plain_data(subject: Subject) -> None:
    """Rows survive JSON unchanged: text, numbers, lists and mappings only. (DESIGN 7.9)"""
    rows = _rows(subject)
    for index in range(min(len(rows), LOOKED_AT)):
        row = dict(rows[index])
        expect(json.loads(json.dumps(row)) == row, f"row {index} is changed by JSON: {row!r}"[:500])


def check_rows_are_the_same_every_time(subject: Subject) -> None:
    """Building a split again gives the same rows in the same order. (DESIGN 7.9)"""
    first, again = _rows(subject), _rows(subject)
    expect(len(first) == len(again), f"{len(first)} rows, then {len(again)}")
    for index in range(len(first)):
        expect(first[index] == again[index], f"row {index} is {first[index]!r}, then {again[index]!r}"[:500])


def check_validation_is_disjoint_from_training(subject: Subject) -> None:
    """No validation row is a training row. (DESIGN 5)"""
    train, validation = _rows(subject), subject.config.build("validation")
    if validation is None:
        raise NotApplicable("this dataset, with these options, has no validation split")
    expect(len(validation) > 0, "the validation split has no rows: build must return None then")
    known = {_identity(train[index]) for index in range(len(train))}
    shared = [index for index in range(len(validation)) if _identity(validation[index]) in known]
    seen = f"{len(shared)} of {len(validation)} validation rows are training rows, e.g. row"
    expect(not shared, f"{seen} {shared[:1]}: {validation[shared[0]] if shared else None!r}"[:500])


def check_unknown_split_gives_no_rows(subject: Subject) -> None:
    """A split that does not exist is ``None`` or a clear error, never other rows. (DESIGN 5)"""
    subject.require_modules()
    try:
        rows = subject.config.build("no-such-split")
    except NemorlError:
        return
    expect(rows is None, f"build('no-such-split') gave {rows!r}"[:300])


def _rows(subject: Subject) -> Sequence[Mapping[str, Any]]:
    subject.require_modules()
    rows = subject.config.build("train")
    expect(rows is not None, "build('train') is None")
    found: Sequence[Mapping[str, Any]] = rows
    return found


def _identity(row: Mapping[str, Any]) -> str:
    """Question and right answer; the whole row where it says neither, or the environment speaks first."""
    said = {} if row.get("prompt") == [] else {key: row[key] for key in CONTENT if key in row}
    return json.dumps(said or dict(row), sort_keys=True, default=str)


def _shape_problem(row: Mapping[str, Any]) -> str | None:
    asked = row.get("prompt", row.get("messages"))
    if row.get("prompt") == []:
        return None
    if "chosen" in row or "rejected" in row:
        if not {"chosen", "rejected"} <= row.keys():
            return "has only one of `chosen` and `rejected`"
        asked = asked if asked is not None else row["chosen"]
    if isinstance(asked, str):
        return None if asked else "has an empty prompt"
    if not isinstance(asked, Sequence) or not asked:
        return "has neither `prompt` nor `messages`"
    turns_are_chat = all(isinstance(turn, Mapping) and {"role", "content"} <= turn.keys() for turn in asked)
    return None if turns_are_chat else "has messages without `role` and `content`"
