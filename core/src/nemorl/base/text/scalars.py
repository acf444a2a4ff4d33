"""Numbers, switches, texts and paths of config fields, read the same way in every field of every config.

A number is a finite number, not ``true``; a switch is true or false, not 1 or ``"yes"``; ``~`` is the home directory
wherever a path is expected.
"""

from __future__ import annotations

import math
import os
import re
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_origin

from annotated_types import Le, Lt
from pydantic.fields import FieldInfo

from nemorl.base.text.naming import PATHS, declared_kind
from nemorl.base.text.reading import expanded, shown

MOST = 10**9
"""Largest whole number of a field that sets no limit of its own (``Field(le=…)``). More of anything is a slip."""
LARGEST = 1e12
"""Largest magnitude of other numbers."""
SHORTEST_S, LONGEST_S = 1e-3, 1e8
"""Of lengths of time in seconds; three years, since threads cannot wait for more than 292."""
_SCIENTIFIC = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+")
"""Numbers that YAML 1.1 leaves as text: ``1e-5``."""
_COLONS = re.compile(r"(\d+):(\d{1,2}):(\d{1,2}):(\d{1,2})")
_UNITS = re.compile(r"\s*".join(rf"(?:(\d+(?:\.\d+)?)\s*{unit})?" for unit in "dhms"))


class Duration:
    """Marks a text field that holds a length of time, read by :func:`seconds`.

    >>> class Job(Config):
    ...     limit: Annotated[str, Duration()] = "3h45m"
    """


class WrongValueError(ValueError):
    """A value that the field's type does not admit: the message, and the fix in ``fix``."""

    def __init__(self, message: str, fix: str) -> None:
        super().__init__(message)
        self.fix = fix


def read_field(name: str, info: FieldInfo, value: Any) -> Any:
    """The value as the field's type means it: numbers checked, ``~`` expanded; seconds (``…_s``) that one can wait.

    Raises:
        WrongValueError: the value is no such thing.
    """
    is_bounded = any(isinstance(limit, Le | Lt) for limit in info.metadata)
    if isinstance(value, str) and declared_kind(info.annotation, info.metadata) in PATHS:
        value = os.path.expanduser(value)
    if value is not None and any(isinstance(mark, Duration) for mark in info.metadata):
        seconds(value)
    value = _read(info.annotation, value, is_bounded=is_bounded)
    if name.endswith("_s") and isinstance(value, int | float) and not isinstance(value, bool):
        _check_seconds(value)
    return value


def seconds(value: Any) -> float:
    """A length of time written as ``DD:HH:MM:SS``, or as numbers with units: ``1d12h``, ``3h45m``, ``90s``.

    Raises:
        WrongValueError: it is neither, or no time at all.

    >>> seconds("00:03:45:00") == seconds("3h 45m") == 13500
    True
    """
    colons = _COLONS.fullmatch(value.strip()) if isinstance(value, str) else None
    units = _UNITS.fullmatch(value.strip()) if isinstance(value, str) else None
    parts = (colons or units).groups(default="0") if colons or units else ()  # type: ignore[union-attr]
    total = sum(float(part) * size for part, size in zip(parts, (86_400, 3_600, 60, 1), strict=bool(parts)))
    if total <= 0:
        raise WrongValueError(
            f"{shown(value)} is no length of time", 'write "00:03:45:00" (DD:HH:MM:SS, in quotes) or 3h45m'
        )
    return total


def _read(annotation: Any, value: Any, *, is_bounded: bool = False) -> Any:
    members = list(_members(annotation))
    if isinstance(value, list | tuple) and (inner := _items_of(members)) is not None:
        items = [_read(inner, item) for item in value]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, Mapping) and (inner := _values_of(members)) is not None:
        return {key: _read(inner, item) for key, item in value.items()}
    has_numbers, takes_text = int in members or float in members, str in members or Path in members
    if isinstance(value, str | Path) and "\0" in str(value):
        raise WrongValueError(f"{shown(str(value))} holds a NUL byte", "give text without it")
    if isinstance(value, str | Path) and Path in members:
        return type(value)(expanded(value))
    if any(get_origin(member) is not None for member in members):
        return value  # a choice of words, or a type that only pydantic knows
    words = "a whole number" if int in members else "a number"
    if isinstance(value, bool):
        if has_numbers and bool not in members:
            raise WrongValueError(f"expected {words}, got {value}", f"give {words}")
        return value
    if bool in members and not has_numbers and isinstance(value, int | float | str) and not takes_text:
        raise WrongValueError(f"expected true or false, got {shown(value)}", "give true or false")
    if has_numbers and isinstance(value, str) and not takes_text:
        if _SCIENTIFIC.fullmatch(value) is None:
            raise WrongValueError(f"expected {words}, got {shown(value)}", f"give {words}")
        value = float(value)
    if has_numbers and isinstance(value, int | float):
        _check_size(value, words, is_bounded=is_bounded)
    return value


def _check_size(value: float, words: str, *, is_bounded: bool) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise WrongValueError(f"{value} is not finite", f"give {words}, or leave the option out")
    limit = MOST if isinstance(value, int) and words == "a whole number" else LARGEST
    if not is_bounded and abs(value) > limit:
        raise WrongValueError(f"{shown(value)} is out of range", f"give {words} up to {limit:,.0f}")
    if is_bounded and abs(value) > 2**64:  # the field's own limit is compared next; here it must only fit a float
        raise WrongValueError(f"{shown(value)} is out of range", f"give {words} that can be meant")


def _check_seconds(value: float) -> None:
    if 0 < value < SHORTEST_S or value > LONGEST_S:
        what = "shorter than any wait" if value < 1 else "more than three years"
        raise WrongValueError(f"{value:g} s is {what}", f"give seconds, from {SHORTEST_S:g} to {LONGEST_S:g}")


def _members(annotation: Any) -> Iterator[Any]:
    origin = get_origin(annotation)
    if origin is Annotated:
        yield from _members(get_args(annotation)[0])
    elif origin in (Union, types.UnionType):
        for member in get_args(annotation):
            yield from _members(member)
    else:
        yield annotation


def _items_of(members: list[Any]) -> Any:
    """The type of the items where all members of a union are lists or tuples of one type."""
    kinds = {get_args(member)[0] for member in members if get_origin(member) in (list, tuple) and get_args(member)}
    return kinds.pop() if len(kinds) == 1 else None


def _values_of(members: list[Any]) -> Any:
    kinds = [get_args(member)[1] for member in members if get_origin(member) in (dict, Mapping)]
    return kinds[0] if len(kinds) == 1 else None
