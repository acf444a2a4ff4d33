"""Timing: seconds per named phase of a step, accumulated until drained; and when single things began and ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple


class Span(NamedTuple):
    """When something began and ended, in seconds of one clock.

    Example:
        >>> Span(0.5, 2.0).shifted(10.0)
        Span(began_s=10.5, ended_s=12.0)
    """

    began_s: float
    ended_s: float

    def shifted(self, seconds: float) -> Span:
        """The same on a clock that is ahead by this much."""
        return Span(self.began_s + seconds, self.ended_s + seconds)


class Timed:
    """Base class of results that say when they were made.

    Example:
        >>> class Answer(Timed):
        ...     span = Span(0.0, 1.5)
        >>> isinstance(Answer(), Timed)
        True
    """

    __slots__ = ()
    span: Span
    """On the clock that the class names."""


class Timer:
    """Seconds per phase. Phases are named after the RL idea: ``generation``, ``policy_training``, …

    Phases may nest; each counts its whole duration, inner phases included. Name an inner phase ``outer/inner``
    (``prepare_for_generation/transfer_and_update_weights``): the report stacks the outer ones only, so that no
    second is counted twice.

    Example:
        >>> timer = Timer()
        >>> with timer.phase("generation"):
        ...     pass
        >>> list(timer.drain())
        ['generation']
    """

    def __init__(
        self, on_enter: Callable[[str], None] | None = None, *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """
        Args:
            on_enter: Called with the name of the phase that now runs: on entry, and again for the outer phase when
                an inner one ends. ``Console.phase`` fits.
            clock: Source of seconds.
        """
        self._on_enter = on_enter
        self._clock = clock
        self._seconds: dict[str, float] = {}
        self._open: list[str] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the block's duration under ``name``, also when it raises."""
        self._open.append(name)
        self._announce()
        started = self._clock()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + self._clock() - started
            self._open.pop()
            self._announce()

    def drain(self) -> dict[str, float]:
        """Seconds per phase that ended since the last call, in order of first end; then starts from zero."""
        seconds, self._seconds = self._seconds, {}
        return seconds

    def _announce(self) -> None:
        if self._on_enter is not None and self._open:
            self._on_enter(self._open[-1])
