"""The options of dataset and environment. reasoning-gym is imported by ``build`` only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from nemorl.config.base import Config
from nemorl.errors import ConfigIssue
from nemorl.plugins.kinds import DatasetConfig, EnvironmentConfig
from pydantic import Field

if TYPE_CHECKING:
    from nemorl.contracts import Environment
    from nemorl.types import Row

HINT = "pip install reasoning-gym"


class TaskConfig(Config):
    """One task of a mixture."""

    weight: float = Field(1.0, gt=0)
    """How often it is drawn, relative to the others."""
    options: dict[str, Any] = Field(default_factory=dict)
    """reasoning-gym's own options of the task, such as its difficulty: ``{max_terms: 3, max_digits: 2}``."""

    def problems(self) -> Iterator[ConfigIssue]:
        yield from super().problems()
        reserved = sorted({"seed", "size"} & self.options.keys())
        if reserved:
            yield ConfigIssue("options", f"{', '.join(reserved)} is the mixture's to set", "use seed and num_train")


class GymMixtureConfig(DatasetConfig):
    """Rows drawn from several generators of reasoning-gym, in proportion to their weights."""

    summary: ClassVar[str] = "weighted mixtures of reasoning-gym tasks, no download"
    requires_modules: ClassVar[tuple[str, ...]] = ("reasoning_gym",)
    install_hint: ClassVar[str] = HINT

    tasks: dict[str, TaskConfig] = Field(default={"chain_sum": TaskConfig()}, min_length=1)
    """Name of the generator -> its share and options."""
    num_train: int = Field(500, ge=1)
    """Distinct problems to train on."""
    num_validation: int = Field(100, ge=0)
    """Distinct held-out problems. 0: no validation split."""
    seed: int = Field(0, ge=0)
    """Chooses the problems. The same seed and version of reasoning-gym give the same rows."""
    chat: bool = True
    """Ask in a chat message. Turn it off for base models."""
    instruction: str = "Give the final answer as <answer>…</answer>."
    """Follows every problem. Empty for none."""

    def build(self, split: str) -> Sequence[Row] | None:
        from nemorl_gym_tasks.rows import mixture

        rows = mixture(self)
        splits = {"validation": rows[: self.num_validation], "train": rows[self.num_validation :]}
        return splits.get(split) or None


class GymTasksConfig(EnvironmentConfig):
    """Grades answers to rows of the ``gym_tasks`` dataset with the scorer of the task they come from."""

    summary: ClassVar[str] = "grades answers to reasoning-gym tasks with their own scorers"
    requires_modules: ClassVar[tuple[str, ...]] = ("reasoning_gym",)
    install_hint: ClassVar[str] = HINT

    def build(self) -> Environment:
        from nemorl_gym_tasks.environment import GymTasksEnvironment

        return GymTasksEnvironment()
