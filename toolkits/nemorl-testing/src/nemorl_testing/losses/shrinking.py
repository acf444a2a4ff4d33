"""From a failing case to the simplest one that fails: fewest rows, shortest rows, simplest numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from nemorl_testing.losses.cases import Case, Row, Value
from nemorl_testing.losses.drawing import SIMPLE

MAX_TRIES = 600
"""Cases that are tried at most: one takes a millisecond or a few."""


def shrink(case: Case, fails: Callable[[Case], bool]) -> Case:
    """The last of ever simpler cases that fail."""
    tries, found = 0, True
    while found:
        found = False
        for simpler in _simpler(case):
            tries += 1
            if tries > MAX_TRIES:
                return case
            if fails(simpler):
                case, found = simpler, True
                break
    return case


def _simpler(case: Case) -> Iterator[Case]:
    """Cases that are simpler by one change, the largest changes first."""
    groups = case.groups
    for index in range(len(groups)):
        if len(groups) > 1:
            yield replace(case, rows=sum(groups[:index] + groups[index + 1 :], ()))
    for index, row in enumerate(case.rows):
        for place in reversed(range(1, len(row.mask))):
            if _may_go(row, place):
                yield _with_row(case, index, row.without(place))
    if case.group == 1 and case.aggregation != "token":
        yield replace(case, aggregation="token")
    for index, row in enumerate(case.rows):
        for simpler in _simpler_rows(row):
            yield _with_row(case, index, simpler)


def _may_go(row: Row, place: int) -> bool:
    """A row that trains goes on training, and every row keeps two tokens."""
    return len(row.mask) > 2 and (not row.mask[place] or sum(row.mask) > 1)


def _with_row(case: Case, index: int, row: Row) -> Case:
    return replace(case, rows=(*case.rows[:index], row, *case.rows[index + 1 :]))


def _simpler_rows(row: Row) -> Iterator[Row]:
    """The same row with simpler numbers: a whole field first, then token by token."""
    ids = tuple(range(1, len(row.token_ids) + 1))
    if row.token_ids != ids:
        yield replace(row, token_ids=ids)
    for name, values in {"outputs": row.outputs, **row.tokens}.items():
        for number in SIMPLE.get(name, ()):
            everywhere = tuple(
                _filled(value, number) if keep else value for keep, value in zip(row.mask, values, strict=True)
            )
            places = [i for i, keep in enumerate(row.mask) if keep]
            each = [(*values[:i], _filled(values[i], number), *values[i + 1 :]) for i in places]
            for changed in (everywhere, *each):
                if _cost(name, changed) < _cost(name, values):
                    yield _with_values(row, name, changed)
    for name, value in row.sequence.items():
        for number in SIMPLE.get(name, ()):
            if _rank(name, number) < _rank(name, value):
                yield replace(row, sequence={**row.sequence, name: number})


def _filled(value: Value, number: float) -> Value:
    return (number,) * len(value) if isinstance(value, tuple) else number


def _with_values(row: Row, name: str, values: tuple[Value, ...]) -> Row:
    if name == "outputs":
        return replace(row, outputs=values)
    tokens: Mapping[str, tuple[Value, ...]] = {**row.tokens, name: values}
    return replace(row, tokens=tokens)


def _cost(name: str, values: tuple[Value, ...]) -> int:
    """How far values are from the simplest ones of the field, so that each change is one for the better."""
    flat = [one for value in values for one in (value if isinstance(value, tuple) else (value,))]
    return sum(_rank(name, one) for one in flat)


def _rank(name: str, number: float) -> int:
    simple = SIMPLE.get(name, ())
    return simple.index(number) if number in simple else 0 if number == 0 else len(simple)
