"""Functions of a text that remember their last answers.

The responses of a group are often equal, and one response's answer is read several times on its way to a grade.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import TypeVar

T = TypeVar("T")

MAX_CHARS = 100
"""Longer texts are read each time: few repeat, and they would fill memory."""
MAX_TEXTS = 4096


def remembered(function: Callable[[str], T]) -> Callable[[str], T]:
    """The same function, which must depend on its text alone and return something that nobody changes."""
    known = lru_cache(maxsize=MAX_TEXTS)(function)

    @wraps(function)
    def answer(text: str) -> T:
        return known(text) if len(text) <= MAX_CHARS else function(text)

    return answer
