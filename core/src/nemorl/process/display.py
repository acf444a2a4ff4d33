"""The display of a run: the terminal's, one that was given, or none."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

from nemorl.contracts import Display


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


def display_of(given: Display | None) -> AbstractContextManager[Display]:
    """The display that was given, else the terminal (``nemorl.Console``), where the command line is installed."""
    from nemorl.plugins.registry import registry

    console = registry().index.names.get("Console")
    found: Any = given if given is not None else console.load()() if console is not None else Silence()
    return found  # type: ignore[no-any-return]
