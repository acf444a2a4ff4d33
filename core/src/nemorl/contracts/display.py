"""The contracts of what shows a run: a display for a person, and loggers; and a display for nobody."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Protocol, Self


class Logger(Protocol):
    """A sink for metrics, already reduced to numbers.

    >>> class Printed:
    ...     def log(self, metrics, step): print(step, dict(metrics))
    ...     def close(self): pass
    """

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Numbers of a step, by full name. Several calls may belong to one step, and a resumed run repeats steps."""
        ...

    def close(self) -> None:
        """Write what is still to be written. Calling it twice, or unused, is harmless."""
        ...


class Display(Protocol):
    """Shows a person what a run does. It lives for the length of a ``with`` block.

    >>> with nemorl.Console(quiet=True) as display: display.message("loading")
    """

    @property
    def is_lost(self) -> bool:
        """Nobody can read it any more."""
        ...

    def message(self, text: str) -> None:
        """One line, now."""
        ...

    def announce(self, text: str) -> None:
        """Say what begins now and takes long."""
        ...

    def phase(self, name: str) -> None:
        """Show the current activity; called often."""
        ...

    def start(self, title: str, total_steps: int | None) -> None:
        """Steps begin."""
        ...

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Metrics of a step, by full name."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...


class Silence:
    """A display that shows nothing."""

    is_lost = False

    def message(self, text: str) -> None: ...

    def announce(self, text: str) -> None: ...

    def phase(self, name: str) -> None: ...

    def start(self, title: str, total_steps: int | None) -> None: ...

    def step(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def __enter__(self) -> Silence:
        return self

    def __exit__(self, *_: object) -> None: ...
