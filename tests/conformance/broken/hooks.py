"""Hook plugins with a mistake each."""

from __future__ import annotations

from typing import Any


class GoodHook:
    essential = True

    def on_step_end(self, step: int, metrics: Any) -> None: ...


class TwinHook(GoodHook):
    """Installed under one name by two distributions."""


class UnknownEvent:
    def on_step_ended(self, step: int) -> None: ...


class UnknownArgument:
    def on_step_end(self, step: int, reward: float) -> None: ...


class NothingToCall:
    def step_end(self, step: int) -> None: ...


class EssentialInWords(GoodHook):
    essential = "no"  # type: ignore[assignment]  # which is true
