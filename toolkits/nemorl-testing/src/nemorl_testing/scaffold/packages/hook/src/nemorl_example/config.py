"""The options. Nothing heavy is imported here: listing and checking configs must work without it."""

from __future__ import annotations

from typing import ClassVar

from nemorl.plugins.kinds import HookConfig
from pydantic import Field


class ExampleConfig(HookConfig):
    """Stops a run when all responses to each prompt earn the same, step after step."""

    summary: ClassVar[str] = "stops a run that has nothing left to learn from"

    patience_steps: int = Field(20, ge=1)
    """So many steps in a row must teach nothing before the run is stopped."""

    def build(self) -> object:
        from nemorl_example.hook import ExampleHook

        return ExampleHook(self.patience_steps)
