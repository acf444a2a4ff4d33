"""The options. Nothing heavy is imported here: listing and checking configs must work without it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from nemorl.metrics import MetricInfo
from nemorl.plugins.kinds import EnvironmentConfig
from pydantic import Field

if TYPE_CHECKING:
    from nemorl.contracts import Environment


class ExampleConfig(EnvironmentConfig):
    """Reward 1 when the last word of a response is the row's ``answer``."""

    summary: ClassVar[str] = "compares the last word of a response with the answer"
    metrics: ClassVar[Mapping[str, MetricInfo]] = {
        "train/environment/too_long": MetricInfo(
            title="Too long",
            unit="share",
            meaning="share of responses beyond max_chars",
            watch_for="growth: raise max_chars",
            smooth=True,
        ),
    }

    max_chars: int = Field(200, ge=1)
    """Longer responses score 0. Raise it when right answers are cut off by it (metric ``too_long``)."""

    def build(self) -> Environment:
        from nemorl_example.environment import ExampleEnvironment

        return ExampleEnvironment(self)
