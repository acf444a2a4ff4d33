"""Config classes with a mistake in what they say about themselves. What they build is sound."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cached_property
from typing import Any, ClassVar

from nemorl.config import Config
from nemorl.plugins.kinds import EnvironmentConfig
from nemorl_dtensor import DTensorConfig
from nemorl_sft import SFTConfig
from pydantic import ConfigDict, Field, field_serializer

from broken.environments import GoodEnvironment


class Sound(EnvironmentConfig):
    """Scores an exact answer."""

    summary: ClassVar[str] = "nothing is wrong with it"
    patience_s: float = 1.0
    """How long to wait, in seconds."""

    def build(self) -> Any:
        return GoodEnvironment()


class Twin(Sound):
    """Installed under one name by two distributions."""


class NoSummary(Sound):
    """Says nothing in ``plugins list``."""

    summary: ClassVar[str] = ""


class LongSummary(Sound):
    """Fills ``plugins list``."""

    summary: ClassVar[str] = "an environment " * 20


class NeedsModulesOfUnknownOrigin(Sound):
    """Leaves its user to find out what to install."""

    requires_modules: ClassVar[tuple[str, ...]] = ("json",)


class OneModuleAsText(Sound):
    """``("json")`` is no tuple."""

    requires_modules: ClassVar[Any] = "json"
    install_hint: ClassVar[str] = "pip install json"


class UndocumentedOption(Sound):
    """Has an option that nobody explains."""

    knob: int = 1


class UndocumentedClass(Sound):
    knob: int = 1
    """Explained, where the class is not."""


class Part(Config):
    """A part of a config."""

    knob: int = 1


class UndocumentedPart(Sound):
    """Its own options are explained, those of its part are not."""

    part: Part = Part()
    """A part."""


class NamesAModelInPassing(Sound):
    """Has an option for a model that is declared as any text."""

    judge_model: str = ""
    """A model of which no policy hears."""


class AcceptsAnything(Sound):
    """Drops what it does not know."""

    model_config = ConfigDict(extra="ignore")


class CanBeChanged(Sound):
    """Two parts of a run may see different options."""

    model_config = ConfigDict(frozen=False)


class HoldsALock(Sound):
    """Keeps something that cannot leave its process."""

    @cached_property
    def lock(self) -> Any:
        return threading.Lock()

    def model_post_init(self, context: Any) -> None:
        assert not self.lock.locked()


class WritesWhatItCannotRead(Sound):
    """Its dump is for people."""

    @field_serializer("patience_s")
    def _with_unit(self, seconds: float) -> str:
        return f"{seconds} seconds"


class WithoutSchema(Sound):
    """Has an option that no editor can know."""

    scorer: Callable[[str], float] | None = Field(None)
    """Another way to score."""


class TakesNoHead(DTensorConfig):
    """Does not take all that the kernel passes to ``build``."""

    supports: ClassVar[frozenset[str]] = frozenset({"reference"})

    def build(self, policy: Any, worker: Any, *, reference: bool) -> Any:  # type: ignore[override]
        return super().build(policy, worker, reference=reference)


class UnreadableAlgorithm(SFTConfig):
    """Its dump is for people: the resolved config of a run does not load again."""

    trainer: ClassVar[str] = "broken.trainers:UnreadableTrainer"
    algorithm: Any = "broken"
    """Name of the algorithm."""

    @field_serializer("batch_size")
    def _with_unit(self, rows: int) -> str:
        return f"{rows} rows"


class LenientAlgorithm(SFTConfig):
    """Drops what it does not know."""

    trainer: ClassVar[str] = "broken.trainers:LenientTrainer"
    algorithm: Any = "broken"
    """Name of the algorithm."""
    model_config = ConfigDict(extra="ignore")
