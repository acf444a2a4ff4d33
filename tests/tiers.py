"""Which of a test's cases run in which tier."""

from __future__ import annotations

from collections.abc import Iterable, Sized
from typing import Any, TypeVar

import pytest

T = TypeVar("T", bound=Sized)

_selected: dict[str, Any] = {}


def pytest_configure(config: pytest.Config) -> None:
    _selected["marks"] = config.getoption("markexpr")


def in_full(cases: T) -> T:
    """These in the tier that has everything, as ``make test-full``; elsewhere none of them.

    For modules whose cases share processes: a mark would come too late to leave a case out.
    """
    from _pytest.mark.expression import Expression

    marks = _selected.get("marks", "")
    is_full = not marks or Expression.compile(marks).evaluate(lambda name, **_: name == "full")
    return cases if is_full else type(cases)()


def only(*kept: object, of: Iterable[object]) -> list[Any]:
    """The values of a parameter, of which those not ``kept`` wait for ``make test-full``."""
    return [pytest.param(value, marks=[] if value in kept else pytest.mark.full) for value in of]
