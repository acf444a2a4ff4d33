"""Hook plugins with a mistake each."""

from __future__ import annotations

from typing import Any, ClassVar

from nemorl.plugins.kinds import HookConfig


class AnyHook(HookConfig):
    """Does what ``mistake`` says."""

    summary: ClassVar[str] = "a hook with a mistake"

    mistake: str = "GoodHook"
    """Name of the class that it builds."""

    def build(self) -> object:
        return MISTAKES[self.mistake]()


class TwinHook(AnyHook):
    """Installed under one name by two distributions."""


class GoodHook:
    essential = True

    def on_step_end(self, step: int, metrics: Any) -> None: ...


class UnknownEvent:
    def on_step_ended(self, step: int) -> None: ...


class UnknownArgument:
    def on_step_end(self, step: int, reward: float) -> None: ...


class NothingToCall:
    def step_end(self, step: int) -> None: ...


class EssentialInWords(GoodHook):
    essential = "no"  # type: ignore[assignment]  # which is true


MISTAKES = {hook.__name__: hook for hook in (GoodHook, UnknownEvent, UnknownArgument, NothingToCall, EssentialInWords)}
