"""A user's regular expression meets a model's text: the match takes a bounded time, whatever either of them is."""

from __future__ import annotations

import regex

MATCH_TIMEOUT_S = 0.2
"""Of one match. An honest pattern takes microseconds."""


class PatternTimeoutError(Exception):
    """A match was given up: nobody knows whether the text has the form."""


class BoundedPattern:
    """A pattern in which a dot matches line ends too. Other threads run while it searches.

    Raises:
        ValueError: It is no regular expression.
    """

    def __init__(self, pattern: str, *, timeout_s: float = MATCH_TIMEOUT_S) -> None:
        try:
            self._pattern = regex.compile(pattern, regex.DOTALL)
        except regex.error as error:
            raise ValueError(str(error)) from error
        self._timeout_s = timeout_s

    def matches(self, text: str) -> bool:
        """The whole text has the form.

        Raises:
            PatternTimeoutError: The search took longer than the pattern's time.
        """
        try:
            return self._pattern.fullmatch(text, timeout=self._timeout_s, concurrent=True) is not None
        except TimeoutError as error:
            raise PatternTimeoutError(f"no verdict after {self._timeout_s:g} s of searching") from error
