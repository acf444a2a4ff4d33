"""The dataset ``drawings``: its options, readable where Pillow is absent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

from nemorl.plugins.kinds import DatasetConfig
from pydantic import Field

if TYPE_CHECKING:
    from nemorl.types import Row

Task = Literal["count", "colour", "place"]


class DrawingsConfig(DatasetConfig):
    """Questions about small drawings, made as they are asked for: nothing is downloaded.

    Example:
        >>> DrawingsConfig(task="colour", num_train=8).size
        28
    """

    summary: ClassVar[str] = "questions about drawn shapes, for models that see: how many, which colour, where"
    requires_modules: ClassVar[tuple[str, ...]] = ("PIL",)
    install_hint: ClassVar[str] = "pip install pillow"

    task: Task = "count"
    """What is asked: how many shapes (1 to 4), the colour of one (r, g, b or y), where it is (l, r, t or b)."""
    size: int = Field(28, ge=16, le=1024)
    """Pixels of each side."""
    blank: bool = False
    """Every drawing is empty, its answer as before: what a model gets right without seeing anything."""
    num_train: int = Field(1024, ge=1)
    """Training rows."""
    num_validation: int = Field(128, ge=0)
    """Held-out rows; drawn by chance as well, so that one may be like a training row."""
    seed: int = 0
    """Of the drawings."""

    def build(self, split: str) -> Sequence[Row] | None:
        from nemorl_tasks.drawings.drawing import Drawings

        count = {"train": self.num_train, "validation": self.num_validation}.get(split, 0)
        return Drawings(self, split, count) if count else None
